"""A small sample of the proof, with real servers; the long run is `penstock prove --only server-deaths`."""

from penstock_lab.prove import server_deaths
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.run import chosen


def test_a_sample_and_a_stream_that_differs(monkeypatch):
    """Guards against a killed server whose clients lose a token, and against a proof that would not notice."""
    noted = []
    note_expected = server_deaths._note_expected

    def note(server, request):
        is_taken = note_expected(server, request)
        noted.append(request)
        if len(noted) == 1:
            request.expected = "what no model says"
        return is_taken

    monkeypatch.setattr(server_deaths, "_note_expected", note)
    monkeypatch.setattr(server_deaths, "STREAMS", 5)
    monkeypatch.setattr(server_deaths, "MAX_KILLS_OF_A_STREAM", 1)
    (proof,) = chosen(["server-deaths"])
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    proof.run(Trials(Subject("demo", {"max_model_len": 512}), outcome, goal=1, seed=4))
    assert len(noted) == 5
    assert outcome.tried >= 1
    assert [what for what in outcome.wrong if "what no model says" not in what] == []
    assert outcome.num_wrong == 1
    assert outcome.figures["streams"] == 5
