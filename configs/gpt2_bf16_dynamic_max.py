"""`gpt2_bf16` with the paper's fix, the dynamic maximum (arXiv 2510.04212, section 4).

Command:   python train.py --config=configs/gpt2_bf16_dynamic_max.py
Cost:      The cost of `gpt2_bf16`, within a few per cent.
Result:    The losses equal those of `gpt2_bf16` as long as that run is healthy. The paper reports
           that the dynamic maximum prevents its failure. With this config neither the failure nor
           its prevention has been reproduced here. The dynamic maximum does not stop an explosion
           that bfloat16 row statistics cause (results/lse_bfloat16).
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_BASE = runpy.run_path(str(Path(__file__).with_name("gpt2_bf16.py")))


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of `gpt2_bf16` with the dynamic maximum as row-max rule."""
    config = _BASE["get_config"](variant)
    config.name = "gpt2_bf16_dynamic_max"
    config.attention.row_max = "dynamic_max"
    return config
