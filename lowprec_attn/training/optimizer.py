"""AdamW, warm-up and cosine decay, from Optax."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from lowprec_attn.training.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then cosine decay to `end_lr` at step `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak_lr,
        warmup_steps=settings.warmup_steps,
        decay_steps=max(steps, settings.warmup_steps + 1),
        end_value=settings.end_lr,
    )


def adamw(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """Chains clipping by global norm, Adam, decoupled weight decay of matrices, and the schedule.

    Loshchilov & Hutter (arXiv 1711.05101); update = −lr · (m̂ / (√v̂ + ε) + λ·w).
    """
    parts = []
    if settings.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(settings.clip_norm))
    adam = optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
    parts.append(adam if settings.eps > 0 else _zero_over_zero_is_zero(adam))
    if settings.weight_decay:
        parts.append(
            optax.add_decayed_weights(
                settings.weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim >= 2, p)
            )
        )
    parts.append(optax.scale_by_learning_rate(learning_rate(settings, steps)))
    return optax.chain(*parts)


def with_layout(settings: OptimizerSettings, clips: bool, decays: bool) -> OptimizerSettings:
    """Returns settings whose Optax state is laid out as with or without clipping and decay."""
    return dataclasses.replace(
        settings, clip_norm=1.0 if clips else None, weight_decay=1.0 if decays else 0.0
    )


def moved(state: optax.OptState, like: optax.OptState) -> optax.OptState:
    """Returns the state of one `adamw` in the places that another has for it.

    Clipping and weight decay have a place in the chain and no arrays. Without one of them the
    arrays behind it stand elsewhere.
    """
    arrays = iter([part for part in state if jax.tree.leaves(part)])
    return tuple(next(arrays) if jax.tree.leaves(part) else part for part in like)


def can_overflow(settings: OptimizerSettings) -> bool:
    """Whether a finite state and a gradient of finite norm can give an update that is not finite.

    The squares of the gradients have a finite sum, so each gradient is below 2⁶⁴, and so is their
    mean m̂. Then |m̂| / (√v̂ + ε) stays below 2⁶⁴ / ε, which float32 holds unless ε is tiny or 0.
    """
    return settings.eps < 2**-60


def _zero_over_zero_is_zero(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adam with ε = 0: a parameter that never had a gradient gets no update instead of NaN."""

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, new_state = adam.update(grads, state, params)
        updates = jax.tree.map(lambda u, nu: jnp.where(nu == 0, 0, u), updates, new_state.nu)
        return updates, new_state

    return optax.GradientTransformation(adam.init, update)
