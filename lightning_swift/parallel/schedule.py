"""Pipeline schedules: which stages a rank holds, how many microbatches a schedule needs, how long its ranks wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_swift.errors import ConfigurationError

__all__ = ["ScheduleName", "ScheduleSettings"]

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

# Schedules with one stage per rank, with several in rounds, and with two along a V.
_SINGLE = ("GPipe", "1F1B")
_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class ScheduleSettings:
    """How the microbatches of a step run through the stages.

    Args:
        name: A schedule of ``torch.distributed.pipelining``.
        microbatches: Number of parts into which the rows of a batch are cut; a batch with fewer rows is padded.
        virtual_stages: Stages per rank. None means 1 for GPipe and 1F1B, and 2 for the others.

    Raises:
        ConfigurationError: A value that is not allowed, also by :meth:`check`.
    """

    name: ScheduleName = "1F1B"
    microbatches: int = 1
    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise _refusal(
                f"schedule={self.name!r} is not known.", fix=f"Choose one of {', '.join(get_args(ScheduleName))}."
            )
        if self.microbatches < 1:
            raise _refusal(f"microbatches={self.microbatches} is not allowed.", fix="Use 1 or more.")
        if self.virtual_stages is not None and self.virtual_stages < 1:
            raise _refusal(f"virtual_stages={self.virtual_stages} is not allowed.", fix="Use 1 or more.")

    @classmethod
    def default(
        cls,
        name: ScheduleName,
        pp: int,
        *,
        microbatches: int | None = None,
        virtual_stages: int | None = None,
    ) -> ScheduleSettings:
        """Settings for ``pp`` ranks with four microbatches per rank unless told otherwise; 1 for one rank.

        Four keep the bubble of 1F1B below a fifth of the step.
        """
        return cls(name, microbatches or (4 * pp if pp > 1 else 1), virtual_stages)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages that each rank holds."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 1 if self.name in _SINGLE else 2

    def n_stages(self, pp: int) -> int:
        """Number of stages on ``pp`` ranks together."""
        return pp * self.stages_per_rank

    def stage_ids(self, pp_rank: int, pp: int) -> list[int]:
        """Numbers of the stages of rank ``pp_rank`` of ``pp``, ascending."""
        if self.name in _V_SHAPED:
            return [pp_rank, 2 * pp - 1 - pp_rank]
        return [pp_rank + turn * pp for turn in range(self.stages_per_rank)]

    def rank_of(self, stage: int, pp: int) -> int:
        """The pipeline rank that holds stage number ``stage``."""
        if self.name in _V_SHAPED:
            return min(stage, 2 * pp - 1 - stage)
        return stage % pp

    def check(self, pp: int) -> None:
        """Refuse what torch would refuse later, on some ranks only, or not at all and then hang.

        Raises:
            ConfigurationError: The rules of the schedule are broken.
        """
        self._check_stages(pp)
        n = self.microbatches
        if self.name == "1F1B" and n < pp:
            raise _refusal(
                f"1F1B needs at least as many microbatches as stages, and has {n} for {pp}.",
                fix=f"Set microbatches={pp} or more.",
            )
        if self.name == "DualPipeV" and n < 2 * pp:
            raise _refusal(
                f"DualPipeV needs at least two microbatches per rank, and has {n} for {pp} ranks.",
                fix=f"Set microbatches={2 * pp} or more.",
            )
        rounds = max(1, n // pp)
        if self.name in _INTERLEAVED and n % rounds:
            raise _refusal(
                f"{self.name} runs {n} microbatches on {pp} ranks in {rounds} rounds, which does not divide.",
                fix=f"Set microbatches to a multiple of {pp}, such as {rounds * pp}.",
            )

    def _check_stages(self, pp: int) -> None:
        count = self.stages_per_rank
        if self.name in _SINGLE and count != 1:
            raise _refusal(
                f"{self.name} has one stage per rank, and virtual_stages={count}.",
                fix="Leave virtual_stages out, or choose Interleaved1F1B.",
            )
        if self.name in _V_SHAPED and count != 2:
            raise _refusal(
                f"{self.name} has two stages per rank, and virtual_stages={count}.", fix="Leave virtual_stages out."
            )
        if self.name in _ZERO_BUBBLE and pp == 1:
            raise _refusal(f"{self.name} on one rank has nothing to overlap.", fix="Choose 1F1B.")

    def bubble(self, pp: int) -> float:
        """Share of a step that a rank waits, if all stages take the same time and a backward pass twice a forward one.

        ``(p - 1) / (v m + p - 1)`` for ``m`` microbatches, ``p`` ranks and ``v`` stages per rank. The schedules that
        split the backward pass fill a part of that: their wait is measured in thirds, of which those that a weight
        pass can fill are left out (Qi et al., "Zero bubble pipeline parallelism", 2024, table 2: ZB-H1).
        """
        work = self.stages_per_rank * self.microbatches
        wait = pp - 1
        if self.name in _ZERO_BUBBLE:
            return wait / (3 * work + wait)
        return wait / (work + wait)


def _refusal(what: str, *, fix: str) -> ConfigurationError:
    return ConfigurationError(what, where="pipeline schedule", fix=fix)
