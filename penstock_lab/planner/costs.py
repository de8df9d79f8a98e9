"""The time of a step on some hardware: bytes and operations divided by rates. Pure arithmetic, no torch.

    read         weights once per step, and the cached keys and values of every sequence
    multiply     two operations per row and weight, times the int8 slices of a row; four per pair of a token and a key.
                 If the hardware has rates by number of rows, they give the time of products of few rows
    exchange     if ranks share a model: the parts that each receives from the others, and the latency of each gather
    host         the time of a step and of each of its sequences outside products

Reading and multiplying overlap, so the longer one counts; exchanges and the host add to it. The longest of the four is
the binding limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.assembly.memory import Products
from penstock.ranks.sharding import Degrees
from penstock.spec.model_config import ModelConfig
from penstock_lab.planner.machines import Hardware

MEMORY_BOUND_SHARE = (
    0.8  # if reading takes at least this share of the multiply time, compute is not reported as the limit
)
FLOAT_BYTES = 4  # bytes of a logit, and of an element of a sum that ranks exchange


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The work that one device does for a model, grouped by how often a step does it.

    Attributes:
        layers: products that every row of a step goes through.
        head: products for only the rows whose logits are wanted.
        experts: products of all experts together; a row goes through `chosen` of `num_experts`.
        token_bytes: cached bytes of a token in one layer; the mean, if layers differ.
        cache_type: type of the cached values.
        pair_operations: operations for a token and one token that it attends to, in one layer; the mean, if they
            differ.
        windows: number of layers and window of each cache group.
        gathers: sums over ranks in a pass, each with `gather_width` float32 values per row.
    """

    layers: Products
    head: Products
    experts: Products
    num_experts: int
    chosen: int
    token_bytes: int
    cache_type: str
    pair_operations: int
    windows: tuple[tuple[int, int | None], ...]
    gathers: int = 0
    gather_width: int = 0
    head_width: int = 0
    degrees: Degrees = field(default_factory=Degrees)


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """One step: each of `sequences` sequences has `cached` tokens and gets `rows` new ones."""

    sequences: int
    rows: int
    cached: int


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts that a step's time depends on.

    Attributes:
        sequences: sequences with at least one new token.
        rows: new tokens of all sequences.
        sampled: rows whose logits are wanted.
        tokens: cached tokens that are read, counted once per layer.
        pairs: pairs of a stream's new token and a token that it attends to, counted once per layer.
        prompt_pairs: such pairs of prompts.
    """

    sequences: float
    rows: float
    sampled: float
    tokens: float
    pairs: float
    prompt_pairs: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step, by cause."""

    read: float
    multiply: float
    exchange: float
    host: float

    @property
    def seconds(self) -> float:
        """The time of the whole step: reading and multiplying overlap."""
        return max(self.read, self.multiply) + self.exchange + self.host

    @property
    def bound(self) -> str:
        """The longest part; compute counts only if reading takes less than MEMORY_BOUND_SHARE of it."""
        parts = {
            "memory bandwidth": self.read,
            "compute": self.multiply if self.read < MEMORY_BOUND_SHARE * self.multiply else 0.0,
            "interconnect": self.exchange,
            "host": self.host,
        }
        return max(parts, key=lambda name: parts[name])

    def plus(self, other: "StepTime") -> "StepTime":
        return StepTime(
            self.read + other.read,
            self.multiply + other.multiply,
            self.exchange + other.exchange,
            self.host + other.host,
        )


GroupTime = Callable[[ModelWork, Hardware, int], tuple[StepTime, float]]


def pipelined(
    works: Sequence[ModelWork], hardware: Hardware, batch: int, tokens: int, time_of_group: GroupTime
) -> tuple[StepTime, float]:
    """Compute the time of a batch that passes through the stages of a pipeline, in as many groups as there are stages.

    A group takes the stages one after the other, and the x and h that they pass on take the link. The groups follow
    one another at the pace of the slowest stage. The engine's own time counts once, with the first stage.

    Args:
        works: the work of each stage.
        tokens: of each sequence; 0 if it decodes, so that the first group's next token follows the last group.
        time_of_group: returns the parts and the seconds of so many sequences on one stage.

    Returns:
        The parts of the time of one group, and the seconds until all groups have passed once.
    """
    groups = min(len(works), batch)
    rows = -(-batch // groups)
    quiet = replace(hardware, step_s=0.0, sequence_s=0.0)
    parts = [time_of_group(work, quiet if index else hardware, rows) for index, work in enumerate(works)]
    total, seconds = StepTime(0.0, 0.0, 0.0, 0.0), sum(found for _, found in parts)
    for part, _ in parts:
        total = total.plus(part)
    if len(works) > 1 and hardware.link_bytes_per_s:
        passed = 2 * works[0].gather_width * FLOAT_BYTES * rows * max(1, tokens)
        links = (len(works) - 1) * (passed / hardware.link_bytes_per_s + hardware.link_latency_s)
        total, seconds = total.plus(StepTime(0.0, 0.0, links, 0.0)), seconds + links
    slowest = max(found for _, found in parts)
    return total, seconds + (groups - 1) * slowest if tokens else max(seconds, groups * slowest)


def step_time(work: ModelWork, hardware: Hardware, step: UniformBatch) -> StepTime:
    tokens, pairs = _attended(work, step)
    of_streams = (pairs, 0.0) if step.rows == 1 else (0.0, pairs)
    amounts = Amounts(step.sequences, step.sequences * step.rows, step.sequences, tokens, *of_streams)
    return time_of(work, hardware, amounts)


def time_of(work: ModelWork, hardware: Hardware, step: Amounts) -> StepTime:
    """Compute the time of a step with these amounts.

    Raises:
        InvalidRequestError: the hardware has no rate for a type of the model.
    """
    rows = step.rows
    shares: list[tuple[Products, float, float]] = [(work.layers, rows, 1.0), (work.head, step.sampled, 1.0)]
    if work.num_experts:
        shares.append((work.experts, rows * work.chosen / work.num_experts, _experts_read(work, rows)))
    read = multiply = 0.0
    for products, times, part in shares:
        read += sum(part * size / hardware.reading(kind) for kind, size in products.num_bytes.items())
        for kind, count in products.operations.items():
            size = part * products.num_bytes.get(kind, 0)
            multiply += hardware.product_seconds(kind, size, times * count, times / part if part else 0.0)
    read += step.tokens * work.token_bytes / hardware.reading(work.cache_type)
    for pairs, rates in (
        (step.pairs, hardware.attend_streams_operations_per_s),
        (step.prompt_pairs, hardware.attend_prompt_operations_per_s),
    ):
        rate = rates.get(work.cache_type) or hardware.multiplying(work.cache_type)
        multiply += pairs * work.pair_operations / rate
    host = hardware.step_s + hardware.sequence_s * step.sequences
    return StepTime(read, multiply, _exchange(work, hardware, rows, step.sampled), host)


def decode_time(work: ModelWork, hardware: Hardware, batch: int, context: int) -> StepTime:
    """Compute the time of a step that gives one token to each of `batch` streams with `context` tokens."""
    return step_time(work, hardware, UniformBatch(batch, 1, max(0, context - 1)))


def prefill_time(
    work: ModelWork, hardware: Hardware, batch: int, prompt_len: int, max_num_batched_tokens: int
) -> tuple[StepTime, float]:
    """Sum up the parts of the steps that compute `batch` prompts in chunks, and the seconds of these steps."""
    total, seconds, done = StepTime(0.0, 0.0, 0.0, 0.0), 0.0, 0
    while done < prompt_len:
        rows = min(max_num_batched_tokens, prompt_len - done)
        together = max(1, max_num_batched_tokens // rows) if not done else 1
        for some in _portions(batch, together):
            part = step_time(work, hardware, UniformBatch(some, rows, done))
            total, seconds = total.plus(part), seconds + part.seconds
        done += rows
    return total, seconds


def twice_the_bandwidth(hardware: Hardware) -> Hardware:
    return replace(hardware, read_bytes_per_s={kind: 2 * rate for kind, rate in hardware.read_bytes_per_s.items()})


def _portions(count: int, at_once: int) -> list[int]:
    return [min(at_once, count - start) for start in range(0, count, at_once)]


def _experts_read(work: ModelWork, rows: float) -> float:
    """Compute the expected share of experts that at least one row chooses, if rows choose evenly."""
    return float(1.0 - (1.0 - work.chosen / work.num_experts) ** rows)


def _attended(work: ModelWork, step: UniformBatch) -> tuple[float, float]:
    """Count the cached tokens that are read, and the pairs of a token and a key, in all layers and sequences."""
    tokens = pairs = 0.0
    for layers, window in work.windows:
        limit = step.cached + step.rows if window is None else window
        tokens += layers * step.sequences * min(step.cached, limit)
        short = max(0, min(step.rows, limit - step.cached))  # rows that see all earlier tokens
        seen = short * step.cached + short * (short + 1) / 2 + (step.rows - short) * limit
        pairs += layers * step.sequences * seen
    return tokens, pairs


def _exchange(work: ModelWork, hardware: Hardware, rows: float, sampled: float) -> float:
    """Compute the seconds in which each rank receives the other ranks' results, one gather after the other."""
    size = work.degrees.size
    if size == 1 or not hardware.link_bytes_per_s:
        return 0.0
    received: float = work.gathers * rows * work.gather_width * FLOAT_BYTES * (size - 1)
    received += sampled * work.head_width * FLOAT_BYTES * (size - 1) / size
    return received / hardware.link_bytes_per_s + (work.gathers + 1) * hardware.link_latency_s


def model_work(
    model: ModelConfig, products: Mapping[str, Products], cache: tuple[int, str, int], degrees: Degrees
) -> ModelWork:
    """Count the work of one of `degrees.size` devices that share a model.

    Args:
        products: the products of "layers", "head" and "experts" on this device.
        cache: on this device, mean bytes of a token in a layer, type, and int8 slices of a query (0: none).
    """
    (token_bytes, cache_type, slices), layers = cache, model.num_hidden_layers
    sizes = [layer.num_attention_heads // degrees.attention * layer.head_dim for layer in map(model.at, range(layers))]
    sums = (degrees.attention > 1) + (max(degrees.mlp, degrees.mixture) > 1)
    return ModelWork(
        layers=products["layers"],
        head=products["head"],
        experts=products["experts"],
        num_experts=model.num_experts,
        chosen=model.num_experts_per_tok,
        token_bytes=token_bytes,
        cache_type=cache_type,
        pair_operations=4 * max(1, sum(sizes) // layers) * max(1, slices),
        windows=tuple(
            (len(group), window and window + model.num_sink_tokens) for group, window in model.cache_groups()
        ),
        gathers=sums * model.num_hidden_layers + (degrees.vocab > 1),
        gather_width=model.hidden_size,
        head_width=model.vocab_size if degrees.vocab > 1 else 0,
        degrees=degrees,
    )
