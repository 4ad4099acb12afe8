"""The Llama-style model in the trainer; tests/commands compares its logits."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run_here, without_report
from llama import forward, rotated
from safetensors.numpy import load_file
from tiny import LLAMA, llama_config, llama_settings, tiny_config, tiny_settings

from configs import llama_bf16
from lowprec_attn import attention, diagnostics
from lowprec_attn.commands.main import main
from lowprec_attn.errors import RunError
from lowprec_attn.gpt2.hugging_face import WeightsError
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.lab.report.mechanism import mechanism
from lowprec_attn.llama import hugging_face
from lowprec_attn.llama.layers import rotate, rotation, swiglu
from lowprec_attn.runs import metrics
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training import models
from lowprec_attn.training.config import ConfigError, train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.loop import Loop
from lowprec_attn.training.qk_clip import largest_scores
from lowprec_attn.training.resources import memory
from lowprec_attn.training.resources.efficiency import step_flops
from lowprec_attn.training.saved_model import restore, settings_of, to_hugging_face
from lowprec_attn.training.signals import make_layers, make_signals
from lowprec_attn.training.step import make_steps, root_key

TILED = functools.partial(attention.dot_product_attention, implementation="tiled")
EXACT = {"model__activation_dtype": "float32", "attention__numerics": "exact", "devices": 1}


def tokens(settings, seed=0):
    """Inputs and targets [A, B/A, T] of a learnable text: runs of consecutive ids."""
    model = settings.model
    start = np.random.default_rng(seed).integers(0, model.vocab_size, (settings.batch_size, 1))
    ids = (start + np.arange(model.context + 1)) % model.vocab_size
    shape = (settings.accumulation_steps, -1, model.context)
    return tuple(jnp.asarray(x.reshape(shape), jnp.int32) for x in (ids[:, :-1], ids[:, 1:]))


def begin(settings):
    steps = make_steps(settings, Attend(TILED))
    return steps, jax.jit(steps.init)(root_key(settings))


SIZES = {"full": 124_766_976, "350m": 354_731_008, "1b": 1_179_191_296}


@pytest.mark.parametrize("variant", SIZES)
def test_the_sizes_have_the_parameters_that_the_config_states(variant):
    settings = train_settings(llama_bf16.get_config(variant).to_dict())
    count = models.parameter_count(settings.model)
    assert count == SIZES[variant]
    assert f"{count / 1e6:,.1f}" in llama_bf16.__doc__


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__tied": True, "model__qk_norm": True},
        {"model__sinks": True, "model__value_size": 8},
    ],
)
def test_parameters_are_counted_as_they_are(changes):
    settings = llama_settings(**changes)
    steps = make_steps(settings, Attend(TILED))
    leaves = jax.tree.leaves(jax.eval_shape(steps.init, root_key(settings)).params)
    assert models.parameter_count(settings.model) == sum(x.size for x in leaves)
    matrices = sum(x.size for x in leaves if x.ndim == 2)
    looked_up = 0 if settings.model.tied else 257 * 32
    per_token = 6 * (models.of(settings.model).product_weights(settings.model))
    of_vectors = sum(x.size for x in leaves if x.ndim == 1)
    assert per_token == 6 * (matrices + of_vectors - looked_up)
    # A row sees half of 32 keys on average. q and k have 1 product forward and 3 backward, v has 1
    # and 2. There are 2 layers and 4 heads.
    channels = 4 * 16 + 3 * settings.model.value_size
    assert step_flops(settings.model, 10) == 10 * (per_token + 2 * 4 * 32 * channels)


def test_rope_is_that_of_hugging_face_in_float64():
    x = np.random.default_rng(0).standard_normal((2, 40, 3, 16)).astype(np.float32)
    ours = rotate(jnp.asarray(x), *rotation(40, 16, 100.0))
    expected = np.stack([rotated(each.astype(np.float64), 100.0) for each in x])
    # An angle of up to 39 has a relative error of 2⁻²⁴; entries are of size 4.
    np.testing.assert_allclose(ours, expected, atol=4 * 39 * 2.0**-23)


def test_scores_of_rotated_vectors_depend_on_their_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    tables = rotation(40, 16, 100.0)
    q, k = (jnp.asarray(np.broadcast_to(x, (1, 40, 1, 16))) for x in (q, k))
    q, k = (rotate(x, *tables)[0, :, 0] for x in (q, k))
    scores = np.asarray(jnp.einsum("th,sh->ts", q, k, precision="highest"))
    for distance in (0, 3, 20):
        same = np.diagonal(scores, -distance)
        np.testing.assert_allclose(same, same[0], atol=16 * 4 * 39 * 2.0**-23)
    assert np.ptp(scores[-1]) > 1


def test_the_gradient_of_swiglu_is_that_of_its_formula():
    gate, up, d = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    _, pullback = jax.vjp(swiglu, jnp.asarray(gate), jnp.asarray(up))
    _, plain = jax.vjp(lambda g, u: jax.nn.silu(g) * u, jnp.asarray(gate), jnp.asarray(up))
    d = jnp.asarray(d)
    for ours, expected in zip(pullback(d), plain(d), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_heads_that_share_a_key_head_are_heads_with_equal_keys():
    options = {"model__layers": 1, **EXACT}
    settings = llama_settings(**options)
    inputs, targets = (x[0] for x in tokens(settings))
    steps, state = begin(settings)
    whole = make_steps(llama_settings(model__kv_heads=4, **options), Attend(TILED))
    loss_of_whole = jax.jit(lambda p: whole.loss(p, inputs, targets)[0])

    def loss_of(heads):
        """The loss where the four query heads use these of the two key heads and value heads."""

        def chosen(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
            if not name.endswith(("key/kernel", "value/kernel")):
                return x
            return x.reshape(32, 2, 16)[:, np.array(heads)].reshape(32, 64)

        params = jax.tree_util.tree_map_with_path(chosen, state.params)
        return loss_of_whole(params)

    grouped = jax.jit(lambda p: steps.loss(p, inputs, targets)[0])(state.params)
    np.testing.assert_allclose(loss_of([0, 0, 1, 1]), grouped, rtol=1e-6)
    assert abs(loss_of([0, 1, 0, 1]) - grouped) > 1e-5


def test_variants_of_attention_have_the_loss_of_the_formula():
    """A soft cap, sinks and another value size in one model; cap and sinks affect its loss."""
    options = {"model__soft_cap": 0.5, "model__sinks": True, "model__value_size": 8}
    settings = llama_settings(**EXACT, **options)
    model = settings.model
    steps, state = begin(settings)
    params = jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, state.params)  # scores that count
    sinks = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    for i in range(2):
        params["blocks"][i]["attention"]["sinks"][...] = jnp.asarray(sinks[i])
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    weights = {
        source: flat[path].T if path.endswith("/kernel") else flat[path]
        for path, source in hugging_face._sources(model).items()
    }
    plain = dataclasses.replace(model, soft_cap=None, sinks=False, value_size=model.head_size)
    config = hugging_face._config(plain)
    inputs, targets = (x[0, :1] for x in tokens(settings))
    loss, grads = jax.jit(jax.value_and_grad(lambda p: steps.loss(p, inputs, targets)[0]))(params)
    inputs, targets = (np.asarray(x[0]) for x in (inputs, targets))

    def of_formula(**options):
        logits, _ = forward(weights, inputs, config, **options)
        lse = np.log(np.exp(logits).sum(-1))
        return (lse - logits[np.arange(len(targets)), targets]).mean()

    np.testing.assert_allclose(loss, of_formula(soft_cap=model.soft_cap, sinks=sinks), rtol=1e-5)
    for left_out in ({"soft_cap": None, "sinks": sinks}, {"soft_cap": 0.5, "sinks": None}):
        assert abs(of_formula(**left_out) - loss) > 1e-3
    assert all(np.any(g) and np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "made",
    [
        functools.partial(
            llama_settings,
            model__qk_norm=True,
            model__soft_cap=0.5,
            model__sinks=True,
            model__value_size=8,
        ),
        functools.partial(tiny_settings, model__qk_norm=True, model__scale_placement="qk"),
    ],
    ids=["llama with qk_norm, cap and sinks", "gpt2 with qk_norm"],
)
def test_the_gradient_of_w_q_is_known_behind_rotation_and_norm(made):
    settings = made(model__layers=1, **EXACT)
    model = settings.model
    steps, state = begin(settings)
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, state.params)
    if model.qk_norm:  # a scale that has an effect
        scale = params["blocks"][0]["attention"]["query_norm"]
        scale = scale if model.architecture == "llama" else scale["norm"]["scale"]
        scale[...] = 1 + 0.3 * jax.random.normal(jax.random.key(0), scale[...].shape)
    inputs, targets = (x[0] for x in tokens(settings))
    score_scale, _ = models.score_scale(model)

    @jax.jit
    def gradients(*args):
        """The gradient of W_Q from the step, and from the arrays that the signals use."""
        grads = jax.grad(lambda *a: steps.loss(*a)[0])(*args)
        (layer,) = make_layers(model, steps.loss)(*args)
        _, pullback = jax.vjp(
            lambda q: TILED(
                *(q, layer.k, layer.v),
                is_causal=True,
                scale=score_scale,
                logits_soft_cap=model.soft_cap,
                sinks=layer.sinks,
                numerics="exact",
            ),
            layer.q,
        )
        dq = layer.projection.pullback()(pullback(layer.do)[0])
        signals, _ = make_signals(model, settings.attention, steps.loss)(*args)
        found = signals["layer_0"]["query_weight_gradient_exact"]
        exact = grads["blocks"][0]["attention"]["query"]["kernel"][...].reshape(layer.w_q.shape)
        return exact, diagnostics.query_weight_gradient(dq, layer.x), found

    exact, ours, found = gradients(params, inputs, targets, jax.random.key(0))
    np.testing.assert_allclose(ours, exact, atol=1e-5 * float(np.abs(exact).max()))
    norms = np.sqrt((np.asarray(exact, np.float64) ** 2).sum(axis=(0, 2)))
    np.testing.assert_allclose(found, norms, rtol=1e-4)


def test_the_measured_error_of_w_q_is_the_sum_of_its_sources():
    """The rotated sources add up to the rotated total; `flash` rounds P̄, O, P and dS."""
    options = {**EXACT, "attention__numerics": "flash", "model__layers": 1}
    settings = llama_settings(model__qk_norm=True, **options)
    steps, state = begin(settings)
    args = (state.params, *(x[0] for x in tokens(settings)), jax.random.key(0))
    call = functools.partial(TILED, is_causal=True, numerics="flash")

    @jax.jit
    def signals_of(*args):
        (layer,) = make_layers(settings.model, steps.loss)(*args)
        _, pullback = jax.vjp(lambda q: call(q, layer.k, layer.v), layer.q)
        arrays = layer._asdict()
        arrays["returned"] = layer.returned._replace(dq=pullback(layer.do)[0])
        return diagnostics.attention_signals(**arrays, numerics="flash", is_causal=True)

    signals = signals_of(*args)
    total = signals["query_weight_gradient_error_from_total"]
    # The measured dQ is also rounded to bfloat16, in addition to the sources.
    measured = signals["query_weight_gradient_error_measured"]
    np.testing.assert_allclose(measured, total, rtol=0.2)
    assert (np.asarray(total) > 1e-4).all()


def test_projections_that_do_not_fit_are_named():
    q = jnp.zeros((1, 4, 2, 8))
    projection = diagnostics.Projection(q[:, :2], lambda x: x)
    with pytest.raises(ValueError, match="projection needs x: the gradient of W_Q takes both"):
        diagnostics.attention_signals(q, q, q, q, numerics="exact", projection=projection)
    with pytest.raises(ValueError, match=r"must have the shape of q \(1, 4, 2, 8\), got \(1, 2"):
        diagnostics.attention_signals(
            q, q, q, q, x=q[:, :, 0], numerics="exact", projection=projection
        )


def test_it_learns_and_devices_change_nothing():
    small = {"model__layers": 1, "attention__implementation": "tiled"}
    settings = llama_settings(devices=1, steps=20, optimizer__weight_decay=0.1, **small)
    steps, state = begin(settings)
    train = jax.jit(functools.partial(steps.train, root=root_key(settings)))
    losses, norms = [], []
    for _ in range(20):
        state, found = train(state, *tokens(settings))
        losses.append(float(found.loss))
        norms.append(float(found.grad_norm))
    assert losses[-1] < losses[0] - 0.5
    spread = llama_settings(devices=8, steps=20, shard_optimizer=True, **small)
    devices, root = run_devices(spread), root_key(spread)
    program = make_program(spread, devices)
    inputs, targets = map(np.asarray, tokens(spread))
    arrays = devices.put({"inputs": inputs, "targets": targets})
    step = program.train.lower(program.state, program.batch, program.batch, program.root).compile()
    analysis = step.memory_analysis()
    allotted = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    assert allotted / 20 < memory.least_bytes(spread, 8) < allotted
    _, found = step(program.init(root), *arrays, root)
    # Each row is computed as on one device; only the mean over rows has another order.
    np.testing.assert_allclose(float(found.loss), losses[0], rtol=1e-5)
    np.testing.assert_allclose(float(found.grad_norm), norms[0], rtol=2e-3)


def test_the_clip_bounds_scores_behind_the_rotation_and_before_a_soft_cap():
    """W_Q and W_K act through a rotation, which preserves lengths; a cap bounds neither."""
    still = {"optimizer__peak_lr": 0.0, "optimizer__end_lr": 0.0}
    options = {**EXACT, **still, "model__kv_heads": 4, "model__layers": 1}
    settings = llama_settings(**options)
    steps, state = begin(settings)
    inputs, targets = (x[0] for x in tokens(settings))

    @jax.jit
    def scores_of(params):
        return largest_scores(settings.model, steps.loss(params, inputs, targets)[1])

    before = np.asarray(scores_of(state.params))
    threshold = float(np.median(before))
    options |= {"optimizer__qk_clip": threshold, "model__soft_cap": threshold / 4}
    clips = make_steps(llama_settings(**options), Attend(TILED))
    new, found = jax.jit(clips.train)(state, *tokens(settings), root_key(settings))
    np.testing.assert_allclose(
        scores_of(new.params)[0], np.minimum(before, threshold)[0], rtol=1e-4
    )
    assert int(found.heads_clipped) == 2
    np.testing.assert_allclose(found.max_logit, before.max(), rtol=1e-6)


REFUSED = {
    "architecture": ({"model__architecture": "mamba"}, "one of gpt2, llama, got 'mamba'"),
    "kv_heads": ({"model__kv_heads": 3}, "kv_heads must be a divisor of 4 heads, got 3"),
    "head_size": ({"model__head_size": 15}, "head_size must be even, .*, got 15"),
    "hidden": ({"model__hidden": 0}, "hidden must be at least 1"),
    "soft_cap": ({"model__soft_cap": 0.0}, "soft_cap must be from 1e-30 to 1e30, or None, got 0"),
    "large soft_cap": ({"model__soft_cap": 1e300}, r"from 1e-30 to 1e30, or None, got 1e\+300"),
    "field": ({"model__biases": True}, "unknown field config.model.biases"),
    "qk_clip": ({"optimizer__qk_clip": 1.0}, "None where model.kv_heads is below model.heads"),
    "a group": (
        {"attention__heads": {1: {"numerics": "exact"}}},
        r"attention\.layers\[0\]: heads 0 to 1 share a key head .* the same arithmetic",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_one_line(case):
    changes, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as error:
        llama_settings(**changes)
    assert "\n" not in str(error.value)


def test_a_head_group_may_differ_and_the_lab_knows_its_mechanism():
    heads = {2: {"numerics": "exact"}, 3: {"numerics": "exact"}}
    config = llama_config(attention__heads=heads)
    first, second = train_settings(config).attention.layers[0]
    assert (first.heads, second.heads) == ((0, 1), (2, 3))
    assert mechanism(config) == mechanism(tiny_config(attention__numerics="flash")) == "B (output)"


class KilledError(BaseException):
    """Stands for the end of the process."""


# The fields of command.TINY, with the shape above.
RUN = {"config": "configs/llama_bf16.py:tiny"} | {f"model__{n}": x for n, x in LLAMA.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text, compiled_once):
    """A finished run from the command line, a function that starts similar runs, and its output."""
    run = functools.partial(run_here, attention__implementation="tiled", data__path=text, **RUN)
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    with without_report():
        said, _ = run(workdir, model__qk_norm=True)
    return workdir, run, said


@pytest.mark.usefixtures("no_report")
def test_an_interrupted_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    workdir, run, said = whole
    assert "4 heads (2 of keys)" in said
    before = Loop._before

    def killed(self, step):
        before(self, step)
        if step == 7:
            raise KilledError

    monkeypatch.setattr(Loop, "_before", killed)
    with pytest.raises(KilledError):
        run(tmp_path / "run", model__qk_norm=True)
    monkeypatch.setattr(Loop, "_before", before)
    said, _ = run(tmp_path / "run", model__qk_norm=True)
    assert "resuming at step 4" in said
    for name in ("metrics.jsonl", "data_order.txt"):
        assert (tmp_path / "run" / name).read_bytes() == (workdir / name).read_bytes()
    last = [r["signals"] for r in metrics.read(workdir / "metrics.jsonl") if "signals" in r][-1]
    # Errors of W_Q past norm and rotation, and a signal that joins this measurement to the last
    # one.
    names = {"query_weight_gradient_error_relative", "common_direction_across_steps"}
    assert names <= last["layer_1"].keys() and len(last["layer_1"]["score_maximum"]) == 4


def test_a_run_is_written_for_transformers(whole, tmp_path):
    workdir, *_ = whole
    to_hugging_face(workdir, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]  # because it has QK-norm
    settings = hugging_face.model_settings(config, "bfloat16")
    params = hugging_face.parameters(load_file(tmp_path / "out" / "model.safetensors"), settings)
    saved = restore(settings_of(workdir), RunDir(workdir))
    jax.tree.map(np.testing.assert_array_equal, params, saved.params)
    before = RunDir(workdir).config.read_bytes()
    with pytest.raises(WeightsError, match=r"config.json is there already; give another folder"):
        to_hugging_face(workdir, workdir)
    assert RunDir(workdir).config.read_bytes() == before
    with pytest.raises(WeightsError, match=r"no llama has soft_cap 5\.0"):
        of = dataclasses.replace(settings, qk_norm=False, soft_cap=5.0)
        hugging_face.save(tmp_path / "capped", of, params)
    config = RunDir(tmp_path / "gpt2").config
    config.parent.mkdir()
    config.write_text(json.dumps(tiny_config()))
    with pytest.raises(RunError, match="its model is gpt2; only llama is written"):
        to_hugging_face(tmp_path / "gpt2", tmp_path / "out")


@pytest.mark.usefixtures("no_report")
def test_a_cap_sinks_and_values_of_another_size_are_measured_and_diagnosed(whole, tmp_path, capsys):
    _, run, _ = whole
    options = {"model__soft_cap": 0.25, "model__sinks": True, "model__value_size": 8}
    options |= {"model__qk_norm": True, "diagnostics_every": 2, "steps": 4, "model__layers": 1}
    run(tmp_path / "run", **options)
    (signals,) = [
        r["signals"]["layer_0"]
        for r in metrics.read(tmp_path / "run" / "metrics.jsonl")
        if r["step"] == 4 and "signals" in r
    ]
    assert len(signals["score_maximum_before_cap"]) == 4
    for before, after in zip(
        signals["score_maximum_before_cap"], signals["score_maximum"], strict=True
    ):
        assert after == pytest.approx(0.25 * np.tanh(before / 0.25), rel=1e-5)
    assert max(signals["p_row_sum_error_rms"]) < 1e-6
    assert main(["diagnose", str(tmp_path / "run"), f"--json={tmp_path / 'out.json'}"]) in (0, 3)
    assert "soft cap 0.25, sinks" in " ".join(capsys.readouterr().out.split())
    (layer,) = json.loads((tmp_path / "out.json").read_text())["layers"]
    assert (layer["soft_cap"], layer["has_sinks"]) == (0.25, True)
    own = layer["signals"]["own numerics"]
    assert max(own["p_row_sum_error_rms"]) < 1e-6
    assert len(own["query_weight_gradient_error_relative"]) == 4
    # A loss that is not finite: the run names what became non-finite first.
    said, _ = run(
        tmp_path / "broken",
        code=3,
        optimizer__peak_lr=1e38,
        optimizer__warmup_steps=0,
        optimizer__clip_norm=None,
        **options,
    )
    assert "first non-finite value" in said
