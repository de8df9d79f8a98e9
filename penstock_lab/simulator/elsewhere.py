"""Replicas on other hardware: their cache is what fits there, and their steps take the time that a plan predicts."""

from dataclasses import dataclass

from penstock import EngineConfig
from penstock.assembly import PlannedEngine
from penstock.errors import invalid, unsupported
from penstock.interface.step import SchedulerOutput
from penstock_lab.planner.costs import Amounts, ModelWork, time_of
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.forecast import Forecaster
from penstock_lab.planner.machines import Hardware
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.planner.report import fitter_of
from penstock_lab.simulator.costs import Shape

NO_WINDOW = 2**62  # finite, so that it can be multiplied by zero sequences


@dataclass(frozen=True, slots=True)
class HardwareCosts:
    """The seconds of steps on some hardware. A StepCosts."""

    work: ModelWork
    hardware: Hardware
    request: float = 0.0

    def step_seconds(self, step: SchedulerOutput) -> float:
        return self.seconds(Shape.of(step.scheduled))

    def decode_seconds(self, sequences: int, cached_tokens: int) -> float:
        return self.seconds(Shape(1.0, sequences, 0, cached_tokens, 0))

    def seconds(self, shape: Shape) -> float:
        """Compute the seconds of a step of this shape, as if its sequences were alike and its prompts one."""
        prompt, sequences = shape.prompt_tokens, shape.sequences + (shape.prompt_tokens > 0)
        # Cached tokens that the new tokens of a prompt attend to.
        before = shape.pairs / prompt - prompt / 2 if prompt else 0.0
        tokens = pairs = prompt_pairs = 0.0
        for layers, window in self.work.windows:
            limit = NO_WINDOW if window is None else window
            tokens += layers * (min(shape.cached_tokens, limit * shape.sequences) + min(max(before, 0.0), limit))
            pairs += layers * min(shape.cached_tokens + shape.sequences, limit * shape.sequences)
            prompt_pairs += layers * min(shape.pairs + prompt / 2, limit * prompt)
        amounts = Amounts(sequences, shape.sequences + prompt, sequences, tokens, pairs, prompt_pairs)
        return time_of(self.work, self.hardware, amounts).seconds

    def as_json(self) -> dict[str, str | float]:
        return {"hardware": self.hardware.name, "devices": self.work.degrees.size}


def plan_replica(config: EngineConfig, hardware: Hardware, budget: Budget) -> tuple[PlannedEngine, HardwareCosts]:
    """Plan an engine on the fewest devices that hold it, and compute the costs of its steps.

    Raises:
        ModelLoadError: there is no such model, or it cannot be served.
        InvalidRequestError: the model does not fit, the hardware has no rates, or an option cannot be planned.
    """
    if not hardware.has_rates:
        raise invalid("hardware", f"{hardware.name} has no rates, so times cannot be predicted")
    if config.parallel.pipeline_parallel_size > 1:
        text = "the steps of a pipeline are not simulated on other hardware; leave it out"
        raise unsupported("pipeline_parallel_size", text)
    source = PlannedModel.read(config, hardware)
    fit = fitter_of(source, budget).fit()
    if not fit.fits:
        advice = f"with {fit.smallest_change} it would fit" if fit.smallest_change else "see `penstock plan`"
        raise invalid("hardware", f"{config.model} does not fit {hardware.name}; {advice}")
    work = Forecaster(source.model, source.sizes, hardware).work(fit)
    return PlannedEngine(fit.config, source.model, list(fit.groups)), HardwareCosts(work, hardware)
