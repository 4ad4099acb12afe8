"""Made-up records of arms, for tests of what is counted over them."""

from typing import Any

from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.records import ArmRecord

_FIELDS = {
    "mechanism": "–",
    "seed": 1,
    "steps": 1000,
    "step_tokens": 512,
    "text_tokens": None,
    "explosion": None,
    "losses": {},
    "val_losses": {},
    "signals": {},
    "failure": None,
}


def arm_record(arm: Arm, **fields: Any) -> ArmRecord:
    """The record of a run of 1,000 steps that held and kept nothing, except for `fields`."""
    return ArmRecord(arm=arm, **(_FIELDS | fields))
