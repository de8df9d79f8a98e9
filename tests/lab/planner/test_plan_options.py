"""Bad input of `penstock plan`: one line that says what to do, before a model is read; and advice that holds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import EngineConfig, InvalidRequestError
from penstock.assembly import plan_engine
from penstock.cli.main import main
from penstock.cli.options import parse_size
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.machines import load_hardware, read_hardware
from penstock_lab.planner.placement import load_placement, read_placement
from penstock_lab.planner.yaml_file import names_in, whole
from tests.lab.planner.test_placement import CHIP
from tests.lab.planner.test_plan import GIB, LLAMA, PLENTY, SEVEN_BILLION, asked, needs_library, written

MIB = 2**20
RIGHT: dict[str, Any] = {
    "name": "mine", "source": "me", "memory_bytes": "64e9", "read_bytes_per_s": "3e11", "operations_per_s": 2e13,
}  # fmt: skip
ON_CHIP = {name: getattr(CHIP, name) for name in CHIP.__slots__}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_chip": {"cores": 1}}, "on_chip lacks buffer_bytes"),
        ({"on_chip": "hello"}, "on_chip must be a mapping"),
        ({"on_chip": ON_CHIP | {"cores": "abc"}}, "on_chip.cores: 'abc'"),
        ({"on_chip": ON_CHIP | {"cores": [2]}}, "on_chip.cores"),
        ({"on_chip": ON_CHIP | {"cores": 2.5}}, "on_chip.cores: 2.5 is not allowed; it must be a whole number"),
        ({"on_chip": ON_CHIP | {"buffer_bytes": float("nan")}}, "on_chip.buffer_bytes: nan"),
        ({"on_chip": ON_CHIP | {"matrix_flops": 0}}, "on_chip.matrix_flops"),
        ({"devices": 10**12}, "devices: 1000000000000 is not allowed; it must be a whole number from 1 to 65536"),
        ({"devices": 10**400}, "devices: an integer of 1329 bits"),
        ({"memory_bytes": "1e300"}, "memory_bytes"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"memory_bytes": True}, "memory_bytes"),
        ({"step_s": float("inf")}, "step_s: inf"),
        ({"link_bytes_per_s": 1e-300}, "link_bytes_per_s"),  # times would be infinite
        ({"operations_per_s": {"bfloat16": 1e-300}}, "operations_per_s.bfloat16"),
        ({"operations_per_s": {"fp8": 1e12}}, "operations_per_s: 'fp8' is not allowed; it must be one of float32"),
        ({"operations_per_s": None}, "operations_per_s.other: None"),
        ({"spread": "wide"}, "spread"),
        ({"spread": {"step_s": [0.1, "x"]}}, "spread.step_s"),
        ({"name": [1]}, "name"),
        ({"colour": "red"}, "the file has an unknown field colour; known are name"),
    ],
)
def test_wrong_hardware_is_refused(changes: dict[str, Any], message: str) -> None:
    """Guards against a traceback, a time of infinity, and a field that is ignored."""
    assert read_hardware(RIGHT | {"on_chip": ON_CHIP}).on_chip == CHIP
    with pytest.raises(InvalidRequestError) as caught:
        read_hardware(RIGHT | changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c\n\t- [", "not YAML"), ("[" * 5000, "nested too deep"), ("", "must be a mapping"),
        ("hello", "must be a mapping"), ("&a [*a]", "must be a mapping"), ("a: 1\na: 2", "a"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("load", [load_hardware, load_placement])
def test_a_file_of_garbage_is_refused(load: Any, text: str, message: str, tmp_path: Path) -> None:
    """Guards against a YAML error that ends in a traceback, or takes the whole stack."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load(str(path))
    with pytest.raises(InvalidRequestError, match="there is no 'nowhere'; names are"):
        load("nowhere")
    with pytest.raises(InvalidRequestError, match="there is no 'aaa"):
        load("a" * 1000)


def test_counts_of_a_placement_have_a_bound() -> None:
    """Guards against a number of chips whose lists take all memory."""
    right = {
        "rows": 4, "context": "2e3", "chips": 4, "sram_per_chip": 10**9, "dram_per_chip": "12e9",
        "attention": {"chips": "0-1"}, "mlp": {"chips": 2},
    }  # fmt: skip
    assert read_placement(right).context == 2000
    for name in ("rows", "context", "chips", "sram_per_chip", "dram_per_chip", "stream_buffer"):
        for value in (1e30, 10**30, -1, "many", 1.5, float("nan")):
            with pytest.raises(InvalidRequestError, match=f"^{name}"):
                read_placement(right | {name: value})
    for item in ({"patern": "x", "chips": 0}, {"pattern": 3, "chips": 0}, {"pattern": "x", "chips": 0, "also": 1}):
        with pytest.raises(InvalidRequestError, match="overrides must be a list of"):
            read_placement(right | {"overrides": [item]})
    for chips in ("0-99999999999", "0-4096", "5000", [], "²"):
        with pytest.raises(InvalidRequestError, match=r"attention\.chips"):
            read_placement(right | {"attention": {"chips": chips}})
    assert whole("n", "4e3", 0, 5000) == 4000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0"), "--devices: '0' is not from 1 to 65536 devices"),
        (("--devices", "8x0GB"), "--devices: '8x0GB': 0GB is not from 1 to"),
        (("--devices", "8x99999999999999GB"), "is not from 1 to"),
        (("--devices", "8x16XB"), "write it like"),
        (("--memory", "0"), "--memory: 0 is not allowed"),
        (("--memory", "nan"), "write it like"),
        (("--hardware", "nope"), "--hardware: there is no 'nope'; names are this, a100-sxm-80gb"),
        (("--hardware", ""), "is not a file"),
        (("--placement", "nope"), "--placement: there is no 'nope'; names are falcon-40b-galaxy"),
        (("--hardware", "wormhole-n150", "--tensor-parallel-size", "2"), "--devices: 1 are too few for a model"),
        (
            ("--devices", "2", "--tensor-parallel-size", "8"),
            "--devices: 2 are too few for a model that is split over 8",
        ),
        (("--plot", "plan.png"), "--plot: 'plan.png' must end with .html or .svg"),
        (("--batch", "-1"), "write it like"),
    ],
)
def test_a_wrong_option_is_one_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an option that is ignored, and an error that does not name it."""
    try:
        code = main(["plan", "/nowhere", *words])
    except SystemExit as ended:  # of argparse
        code = int(ended.code or 0)
    found = capsys.readouterr()
    assert (code, found.out) == (2, "")
    assert message in found.err
    assert len(found.err.splitlines()) == 1


def test_a_mistake_does_not_wait_for_numpy() -> None:
    """Guards against a mistake that is answered after everything was imported, torch included."""
    script = (
        "import sys; from penstock.cli.main import main\n"
        "assert main(['plan', 'demo', '--hardware', 'nope']) == 2\n"
        "assert not {'numpy', 'torch', 'rich'} & set(sys.modules)\n"
        "assert main(['plan', 'demo', '--kernels', 'reference']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "--kernels: 'reference' is not allowed; it must be cpu" in ended.stderr


# --- advice --------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.covers("J21")
@pytest.mark.parametrize(
    ("size", "count", "options"),
    [
        (GIB // 2, 1, {"max_model_len": 4096}), (2 * GIB, 1, {"max_model_len": 4096}),
        (4 * GIB, 8, {"kv_cache_memory_bytes": MIB}), (4 * GIB, 2, {"kv_cache_memory_bytes": 100 * GIB}),
    ],
)  # fmt: skip
def test_advice_that_is_followed_fits(size: int, count: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a change that, once made, is refused again, and a plan that fits while its cache does not."""
    directory = written(tmp_path, SEVEN_BILLION | {"num_hidden_layers": 4})
    refused = asked(directory, Budget(size, 50 * MIB, None, count), **options)
    assert not refused["fits"]
    name, value = refused["smallest_change"].split(" = ")
    if name == "memory":
        size = parse_size(value)
        too_small = asked(directory, Budget(size - 2 * MIB, 50 * MIB, None, count), **options)
        assert not too_small["fits"]
    else:
        options = options | {name: int(value) if value.isdigit() else value}
    assert asked(directory, Budget(size, 50 * MIB, None, count), **options)["fits"]


@needs_library
def test_processes_of_one_machine_share_its_memory(tmp_path: Path) -> None:
    """Guards against two processes that each count on all of the machine, and a cache unlike the engine's."""
    options = {"model": written(tmp_path, LLAMA), "tensor_parallel_size": 2, "max_num_seqs": 3, "threads": 1}
    for given in ({"memory": PLENTY}, {"memory": PLENTY, "kv_cache_memory_bytes": 3 * MIB}):
        planned = plan_engine(EngineConfig.from_options(**options, **given))
        words = {name: value for name, value in (options | given).items() if name not in ("model", "memory")}
        result = asked(options["model"], Budget(PLENTY, 0, shared=True), **words)
        (group,) = planned.groups
        token_bytes = 2 * result["cache_bytes_per_token"]
        caches = [device["cache_bytes"] for device in result["devices"]]
        assert sum(caches) == group.num_blocks * group.block_size * token_bytes
        assert {device["budget_bytes"] for device in result["devices"]} == {PLENTY // 2}
    elsewhere = asked(options["model"], Budget(PLENTY, 0, None, 2), **words)
    assert [device["cache_bytes"] for device in elsewhere["devices"]] == caches


def test_names_are_those_of_the_files(tmp_path: Path) -> None:
    """Guards against a name that is listed and not there."""
    (tmp_path / "b.yaml").touch()
    (tmp_path / "a.yaml").touch()
    (tmp_path / "c.txt").touch()
    assert names_in(tmp_path) == ["a", "b"]
