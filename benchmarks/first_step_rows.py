"""The rows of ``make bench-first-step``, and what is checked in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

UNCAPPED, PLANNED, LARGE_PAGES = "uncapped", "planned", "planned, large pages"
EAGER, CHECKPOINTING = "eager", "checkpointing"
WAYS = (UNCAPPED, PLANNED, LARGE_PAGES, EAGER, CHECKPOINTING)
RAN, OUT_OF_MEMORY, REFUSED, FAILED = "ran", "out of memory", "refused", "failed"

RSS_TOLERANCE = 0.05  # of the budget and what importing torch takes
START_S = 2.0  # that planning may take besides the capture and some steps


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train one model, in a process of its own; what is not known is None.

    Attributes:
        model: its name.
        way: UNCAPPED (eager PyTorch without a cap), or under the cap PLANNED, LARGE_PAGES (planned, with
            THP_MEM_ALLOC_ENABLE=1), EAGER or CHECKPOINTING.
        status: RAN; OUT_OF_MEMORY; REFUSED with one clear error of the planner; FAILED in another way.
        message: the first line of the error.
        eager_peak_bytes: of a step of eager PyTorch, by the allocator, static bytes included.
        static_bytes: of parameters, buffers and the batch.
        eager_growth_bytes: by how much VmData grows in eager training.
        budget_bytes: of the plan.
        room_bytes: by how much VmData may grow: half way between what the budget leaves and what eager training takes.
        ready_rss_bytes: RSS before planning, with the model and a batch in memory.
        library_rss_bytes: by how much building the model raises the RSS besides its tensors: what its library imports.
        planning_rss_bytes: highest RSS until ``planner.compile`` returns.
        training_rss_bytes: highest RSS of the steps.
        torch_rss_bytes, dynamo_rss_bytes: RSS of a process that has imported torch, or torch._dynamo, and nothing else.
        digest: of all losses, and of parameters, buffers and the random state in the end.
        step_s: median of the last steps, with the optimizer's.
        capture_s: of capturing the step, a part of planning.
        compile_s: of ``planner.compile``.
        first_step_s: from the call to the end of the first step.
        planning_steps: how many eager steps planning may take, besides the capture.
        first_overhead, first_gap: predicted, of the plan that training began with.
        last_overhead, last_gap: of the plan in use after the last step.
        measured_peak_bytes: of the plan in use after the last step.
        swaps: for each plan but the first: step, seconds since the step was made, and reason; separated by semicolons.
        steps: that are trained.
        seed: of weights, batches and random state.
        machine, commit, torch, transformers: what it was made on and with.
    """

    model: str
    way: str
    status: str
    message: str = ""
    eager_peak_bytes: int | None = None
    static_bytes: int | None = None
    eager_growth_bytes: int | None = None
    budget_bytes: int | None = None
    room_bytes: int | None = None
    ready_rss_bytes: int | None = None
    library_rss_bytes: int | None = None
    planning_rss_bytes: int | None = None
    training_rss_bytes: int | None = None
    torch_rss_bytes: int | None = None
    dynamo_rss_bytes: int | None = None
    digest: str = ""
    step_s: float | None = None
    capture_s: float | None = None
    compile_s: float | None = None
    first_step_s: float | None = None
    planning_steps: int | None = None
    first_overhead: float | None = None
    first_gap: float | None = None
    last_overhead: float | None = None
    last_gap: float | None = None
    measured_peak_bytes: int | None = None
    swaps: str = ""
    steps: int | None = None
    seed: int | None = None
    machine: str = ""
    commit: str = ""
    torch: str = ""
    transformers: str = ""


@dataclass(frozen=True, slots=True)
class Trained:
    """The rows of one model. All are there."""

    uncapped: Row
    planned: Row
    large_pages: Row
    eager: Row
    checkpointing: Row

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.uncapped.model

    @property
    def plans(self) -> tuple[Row, Row]:
        """The rows of planned steps."""
        return self.planned, self.large_pages

    @property
    def same_bits(self) -> bool:
        """True if losses, parameters, buffers and the random state are those of eager PyTorch without a cap."""
        return all(row.status == RAN and row.digest == self.uncapped.digest for row in self.plans)

    @property
    def allowed_rss_bytes(self) -> int | None:
        """What the process may have resident: the budget, what importing torch and the model's library takes, and 5% of both."""
        budget, torch = self.planned.budget_bytes, self.planned.torch_rss_bytes
        if budget is None or torch is None:
            return None
        return int((1 + RSS_TOLERANCE) * (budget + torch + (self.planned.library_rss_bytes or 0)))

    @property
    def allowed_first_step_s(self) -> float | None:
        """When the first step should have ended: the capture, some steps of eager PyTorch and 2 s."""
        capture_s, step_s, steps = self.planned.capture_s, self.uncapped.step_s, self.planned.planning_steps
        return None if capture_s is None or step_s is None or steps is None else capture_s + steps * step_s + START_S

    @property
    def excess_rss_bytes(self) -> int | None:
        """By how much the highest RSS is over what is allowed; 0 or less where it is within."""
        taken, allowed = self.planned.training_rss_bytes, self.allowed_rss_bytes
        return None if taken is None or allowed is None else taken - allowed

    @property
    def excess_s(self) -> float | None:
        """By how much the first step ended later than it should; 0 or less where it did not."""
        taken, allowed = self.planned.first_step_s, self.allowed_first_step_s
        return None if taken is None or allowed is None else taken - allowed


def by_model(rows: Sequence[Row]) -> list[Trained]:
    """Return the models whose rows are all there; those of one model lie together."""
    groups = (({row.way: row for row in group}) for _, group in groupby(rows, key=attrgetter("model")))
    return [Trained(*(group[way] for way in WAYS)) for group in groups if len(group) == len(WAYS)]


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each model that eager PyTorch cannot train, or a plan cannot under the cap, or not to the same bits."""
    bad = [row for row in rows if row.way == UNCAPPED and row.status != RAN]
    lines = [f"{row.model}: eager PyTorch without a cap: {row.status}: {row.message}" for row in bad]
    for trained in by_model(rows):
        failed = [row for row in trained.plans if row.status != RAN]
        lines += [f"{row.model}: {row.way}: {row.status}: {row.message}" for row in failed]
        if not failed and not trained.same_bits:
            lines.append(f"{trained.model}: losses, parameters, buffers or random state are not those of eager PyTorch")
    return lines
