"""Finds targets by name: attention functions of any library, each as one call."""

import dataclasses

from lowprec_attn import attention
from lowprec_attn.check import functions, libraries
from lowprec_attn.check.calls import TargetError
from lowprec_attn.check.target import Options, Setting, Target

KNOWN = (
    f"jax.nn[:xla|cudnn], torch.sdpa[:{'|'.join(libraries.BACKENDS)}], torch.flex, "
    "flash_attn, flash_attn_interface, "
    f"lowprec_attn[:{'|'.join(attention.IMPLEMENTATIONS)}], tokamax[:IMPLEMENTATION], splash, "
    "MODULE:FUNCTION"
)
_LIBRARIES = {
    "jax.nn": libraries.jax_nn,
    "torch.sdpa": libraries.sdpa,
    "torch.flex": libraries.flex,
    "flash_attn": libraries.flash_attn,
    "flash_attn_interface": libraries.flash_attn_interface,
    "lowprec_attn": libraries.own,
    "tokamax": libraries.tokamax,
    "splash": libraries.splash,
}
_NAMES = {"window": "window", "soft_cap": "soft cap", "sinks": "sinks", "bias": "bias"}


def find(name: str, options: Options | None = None) -> Target:
    """Returns the target with this name.

    Args:
      name: `jax.nn`, `torch.sdpa`, `torch.flex`, `flash_attn`, `flash_attn_interface`,
        `lowprec_attn`, `tokamax` or `splash`, each with an implementation after a colon if it has
        several, such as `jax.nn:cudnn`; or MODULE:FUNCTION.
      options: how the function is called; None: the defaults of `Options`.

    Raises:
      TargetError: there is no such target, its library is not installed, an option is missing or
        does not apply, or the target lacks what every problem should have.
    """
    options = options or Options()
    library, _, choice = name.partition(":")
    of_module = choice and library.startswith("flash_attn")  # another function of this package
    if library not in _LIBRARIES or of_module:
        if not choice:
            raise TargetError(f"unknown target {name!r}; targets are {KNOWN}")
        return dataclasses.replace(functions.named(name, options), name=name)
    given = {
        "framework": options.framework,
        "layout": options.layout,
        "keyword": options.keywords or None,
        "scale": options.scale,
        "alignment": options.alignment,
        "no-backward": None if options.backward else True,
    }
    for flag, value in given.items():
        if value is not None:
            raise TargetError(f"--{flag} goes with MODULE:FUNCTION; leave it out for {library}")
    target = _LIBRARIES[library](choice, options)
    setting = Setting.of(options)
    for lacking in sorted(setting.names - target.can):
        flag = f"--{lacking.replace('_', '-')}"
        raise TargetError(f"{library} has no {_NAMES[lacking]}; leave out {flag}")
    can = set(target.can)
    if options.causal is not None:
        can -= {"full" if options.causal else "causal"}
    if not options.groups:
        can -= {"groups"}
    return dataclasses.replace(
        target,
        name=name,
        can=frozenset(can),
        setting=setting,
        lse_gradient=options.lse_gradient,
        tokens=options.tokens or target.tokens,
        head_size=options.head_size or target.head_size,
    )
