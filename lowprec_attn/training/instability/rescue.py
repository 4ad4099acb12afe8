"""Rolls a run back to a checkpoint by itself: when, to which step, and what it keeps for that.

All decisions depend only on the recorded losses and on earlier rollbacks. A run that was killed at
any instant therefore goes back at the same step, and to the same step, as an undisturbed run.
"""

from lowprec_attn import hosts
from lowprec_attn.errors import RunError
from lowprec_attn.files import read_record
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.instability.rollbacks import Reason, Rollback, RollbackRecord, target
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.settings import TrainSettings


class Rescue:
    """The past and future rollbacks of a run.

    Args:
      settings: settings of the run.
      run_dir: directory of the run, opened.
      checkpoints: checkpoints of the run.
      record: record of the rollbacks so far.

    Attributes:
      record: the record that was given.
    """

    def __init__(
        self,
        settings: TrainSettings,
        run_dir: RunDir,
        checkpoints: Checkpoints,
        record: RollbackRecord,
    ) -> None:
        self._settings, self._every = settings.rollback, settings.checkpoint_every
        self._stop_exploded_after = settings.stop_exploded_after
        self._run_dir, self._checkpoints, self.record = run_dir, checkpoints, record
        self._first_step = hosts.from_first(
            lambda: read_record(run_dir.origin, step=int)["step"] if run_dir.origin.exists() else 0
        )

    @property
    def possible(self) -> bool:
        """Whether the config allows another rollback."""
        return self._settings is not None and len(self.record.rollbacks) < self._settings.tries

    @property
    def excess_limit(self) -> int | None:
        """Steps of excess loss after which the run goes back or, with no try left, stops; or None.

        None means that an excess has no consequence.
        """
        return self._stop_exploded_after if self._settings is None else self._settings.after

    def keep_from(self, step: int, onset: int | None) -> int | None:
        """Returns the earliest step to which the run may still go back; None if it cannot.

        Args:
          step: the next step.
          onset: the step at which the loss began to rise, None if nothing is wrong now.
        """
        return self._target(step if onset is None else onset) if self.possible else None

    def roll_back(self, onset: int, detected: int, reason: Reason) -> None:
        """Records a rollback, which puts it into effect; see `runs.instability.rollbacks`.

        Raises:
          RunError: there is no checkpoint to go back to.
        """
        wanted = self._target(onset)
        to = self._checkpoints.newest(wanted)
        if to is None:
            raise RunError(
                f"the loss rose from step {onset} on, and {self._run_dir.checkpoints} has no "
                f"checkpoint at or before step {wanted}; resume_from a copy of the run that has one"
            )
        self.record.add(Rollback(to, onset, detected, detected + 1 - to, reason))

    def _target(self, onset: int) -> int:
        assert self._settings is not None
        done = self.record.rollbacks
        first = done[-1].to if done else self._first_step
        return target(onset, self._settings.steps, self._every, first)
