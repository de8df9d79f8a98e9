"""EveryDraft: the policy of proofs, which need drafts whether they pay or not."""

from collections.abc import Mapping

from penstock.engine.draft_policy import DraftPolicy


class EveryDraft(DraftPolicy):
    """Computes every draft."""

    @property
    def may_enter(self) -> bool:
        return True

    @property
    def may_think(self) -> bool:
        return True

    def choose(self, limits: Mapping[str, int], num_requests: int) -> dict[str, int]:
        return dict(limits)
