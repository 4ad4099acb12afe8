"""`lowprec_attn.torch.capture` on modules of every kind, against the arrays that they keep."""

import contextlib
import functools
import sys
import threading
import types

import numpy as np
import pytest

from lowprec_attn import attention
from lowprec_attn.diagnostics import CaptureError
from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn import functional  # noqa: E402 (only where there is torch)
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from lowprec_attn.torch import capture  # noqa: E402
from lowprec_attn.torch.capture import first_pass  # noqa: E402

B, T, WIDTH, HEADS, KV_HEADS = 2, 12, 32, 4, 2
SIZE = WIDTH // HEADS
USUAL = [functional.scaled_dot_product_attention]  # in a list, because a capture replaces names


class Layer(torch.nn.Module):
    """A layer with one product for q, k and v as in nanoGPT.

    With `grouped` it has grouped heads and rotates q and k after the product. It keeps the
    arguments of attention, and O, whose gradient autograd keeps.
    """

    def __init__(self, grouped=False, **options):
        super().__init__()
        self.kv_heads = KV_HEADS if grouped else HEADS
        self.grouped, self.options = grouped, options
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * self.kv_heads) * SIZE)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.seen = []

    def forward(self, x):
        sizes = [n * SIZE for n in (HEADS, self.kv_heads, self.kv_heads)]
        q, k, v = (y.view(*x.shape[:2], -1, SIZE).transpose(1, 2)
                   for y in self.qkv(x).split(sizes, dim=-1))  # fmt: skip
        if self.grouped:
            q, k = q.roll(1, -1) * 2, k.roll(1, -1)
        o = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.grouped, **self.options
        )
        if not torch.compiler.is_compiling():
            if o.requires_grad:
                o.retain_grad()
            self.seen.append({"q": q, "k": k, "v": v, "o": o, "x": x})
        return x + self.out(o.transpose(1, 2).reshape(x.shape))


def model(*layers):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer(**options) for options in layers))


def inputs(length=T, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, length, WIDTH, generator=generator, dtype=dtype)


def rows_first(x):
    return x.detach().float().transpose(1, 2).numpy()


def agree(layer, seen, sequences=None):
    for name in "qkv":
        np.testing.assert_array_equal(np.float32(layer[name]), rows_first(seen[name])[:sequences])
    np.testing.assert_array_equal(np.float32(layer["do"]), rows_first(seen["o"].grad)[:sequences])
    assert np.any(layer["do"])


@pytest.mark.parametrize("sequences", [1, None])
@pytest.mark.parametrize("half", [False, True])
def test_every_layer_is_captured_and_no_value_changes(sequences, half, tmp_path):
    net = model({}, {"grouped": True, "scale": 0.3}, {})
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        net(x).square().mean().backward()
        expected = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        with capture(sequences) as taken:
            net(x).square().mean().backward()
    for p, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0)
    assert functional.scaled_dot_product_attention is USUAL[0]
    assert list(taken.layers) == ["layer_00", "layer_01", "layer_02"]
    taken.save(tmp_path / "step.npz")
    read = array_file.load(tmp_path / "step.npz")
    for layer, one, of_file in zip(net, taken.layers.values(), read, strict=True):
        seen = layer.seen[-1]
        agree(one, seen, sequences)
        assert one["q"].dtype == ("bfloat16" if half else "float32")
        assert one["k"].shape[2] == layer.kv_heads
        np.testing.assert_array_equal(of_file.do, one["do"])
        assert (of_file.is_causal, of_file.scale) == (True, layer.options.get("scale", SIZE**-0.5))
        # X is captured only where q is X W, not where q is rotated after the product.
        assert ("x" in one) is not layer.grouped
        if not layer.grouped:
            shown = seen["x"].to(torch.bfloat16) if half else seen["x"]
            np.testing.assert_array_equal(
                np.float32(of_file.x), shown.detach().float().numpy()[:sequences]
            )


@pytest.mark.parametrize("rows_before_batch", [False, True])
def test_the_input_of_wq_is_told_in_the_order_of_q(rows_before_batch):
    """B and T are equal here, so that the shape does not show the order."""
    x = inputs(length=B)
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    given = x.transpose(0, 1) if rows_before_batch else x
    with capture(None) as taken:
        q = (given.contiguous() @ w).view(B, B, HEADS, SIZE)
        q = q.permute(1, 2, 0, 3) if rows_before_batch else q.transpose(1, 2)
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    np.testing.assert_array_equal(taken.layers["layer_00"]["x"], x.numpy())


@pytest.mark.parametrize("rows", [np.s_[:, 1:], np.s_[1:], np.s_[1:, -1:]])
def test_the_input_of_a_part_of_the_rows_is_that_part(rows):
    x, w = inputs(), torch.randn(WIDTH, 3 * WIDTH, requires_grad=True)
    with capture(None) as taken:
        of_all = (x @ w)[rows].unflatten(-1, (3, HEADS, SIZE))
        q, k, v = of_all.transpose(1, 3).unbind(2)
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    np.testing.assert_array_equal(taken.layers["layer_00"]["x"], x[rows].numpy())


def test_heads_that_have_inputs_of_their_own_have_no_common_one():
    """Each head has a product of its own, of its own part of the width."""
    x, w = inputs(), torch.randn(HEADS, SIZE, SIZE, requires_grad=True)
    with capture() as taken:
        q = x.view(B, T, HEADS, SIZE).transpose(1, 2) @ w
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert "x" not in taken.layers["layer_00"]


def _jagged():
    return torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)


def _nested():
    return torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize(
    "product",
    [
        lambda: torch.mm(torch.eye(4).to_sparse(), torch.eye(4).to_sparse()),
        lambda: functional.linear(_jagged(), torch.ones(4, 4)),
        lambda: functional.linear(_nested(), torch.ones(4, 4)),
        lambda: torch.func.grad(lambda x: (x @ x).sum())(torch.ones(4, 4)),
    ],
    ids=["sparse", "jagged", "nested", "of torch.func"],
)
def test_products_of_tensors_without_memory_are_passed_over(product):
    with capture() as taken:
        product()
        q = (inputs() @ torch.randn(WIDTH, WIDTH)).view(B, T, HEADS, SIZE).transpose(1, 2)
        functional.scaled_dot_product_attention(q, q, q)
    assert "x" in taken.layers["layer_00"]


def test_under_inference_mode_q_has_no_input():
    with torch.inference_mode(), capture() as taken:
        q = (inputs() @ torch.randn(WIDTH, WIDTH)).view(B, T, HEADS, SIZE).transpose(1, 2)
        functional.scaled_dot_product_attention(q, q, q)
    assert not taken.layers["layer_00"].keys() & {"x", "do"}


def test_attention_within_torch_func_is_refused():
    with pytest.raises(CaptureError, match=r"torch\.func .* differentiate by backward"), capture():
        torch.func.grad(lambda q: functional.scaled_dot_product_attention(q, q, q).sum())(
            torch.ones(1, 1, 4, 8)
        )


def test_calls_of_threads_keep_their_own_do(monkeypatch):
    """As in a DataParallel. Every thread takes its mask before one of them adds its call."""
    together = threading.Barrier(2, timeout=10)
    module = sys.modules["lowprec_attn.torch.capture"]  # the package's name is the function
    usual = module._host

    def wait(x):
        if x.dtype is torch.bool:
            together.wait()
        return usual(x)

    monkeypatch.setattr(module, "_host", wait)

    def run(size):
        q = torch.full((1, 1, 4, 8), size, requires_grad=True)
        seen = torch.ones(4, 4, dtype=torch.bool)
        (size * functional.scaled_dot_product_attention(q, q, q, seen)).sum().backward()

    with capture() as taken:
        threads = [threading.Thread(target=run, args=(size,)) for size in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(one["q"].max() for one in taken.layers.values()) == [1, 2]
    for one in taken.layers.values():
        assert one["do"].max() == one["q"].max()


@pytest.mark.parametrize("block", [capture, first_pass])
def test_replicas_of_a_data_parallel_are_no_further_layers(block, monkeypatch):
    """Replicas run in threads on several devices; here the CPU stands for all of them."""
    of_cpu = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_: torch.device("cpu"),
        "current_stream": lambda _: contextlib.nullcontext(),
        "device_index": lambda _: contextlib.nullcontext(),
    }
    for name, value in of_cpu.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    replicas = [model({}, {"grouped": True}) for _ in range(3)]
    parts = [((i + 1) * inputs(),) for i in range(3)]

    def repeated(x, of):
        return checkpoint(of, x, use_reentrant=False)

    with block() as taken:
        calls = [functools.partial(repeated, of=replica) for replica in replicas]
        found = torch.nn.parallel.parallel_apply(calls, parts)
        sum(y.square().mean() for y in found).backward()
    layers = ["layer_00", "layer_01"]
    assert list(taken.layers) == (
        layers if block is first_pass else [x + of for x in layers for of in ("", ".1", ".2")]
    )
    plain = model({}, {"grouped": True})
    for (x,) in parts:
        (plain(x).square().mean()).backward()
    for name, one in taken.layers.items():
        layer, _, replica = name.partition(".")
        agree(one, plain[int(layer[-1])].seen[int(replica or 0)], 1)


def test_a_q_that_was_written_into_has_no_input():
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with capture() as taken:
        q = (inputs() @ w).view(B, T, HEADS, SIZE).transpose(1, 2)
        q[..., 0] = 0
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert "x" not in taken.layers["layer_00"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_there_once(reentrant):
    net = model({}, {"grouped": True}, {})
    x = inputs().requires_grad_()
    run = torch.nn.Sequential(*net[:2])
    with capture() as taken:
        y = checkpoint(run, x, use_reentrant=reentrant)
        checkpoint(net[2], y, use_reentrant=reentrant).square().mean().backward()
    assert list(taken.layers) == ["layer_00", "layer_01", "layer_02"]
    plain = model({}, {"grouped": True}, {})
    plain(x).square().mean().backward()
    for one, layer in zip(taken.layers.values(), plain, strict=True):
        agree(one, layer.seen[0], 1)
        assert ("x" in one) is not layer.grouped


def test_a_checkpoint_that_repeats_something_else_is_refused():
    """The random state is not restored, so noise before attention differs when it is repeated."""
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    x = torch.randn(1, HEADS, T, SIZE, requires_grad=True)

    def noisy(x):
        x = (x + torch.randn_like(x)) @ w
        return functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(CaptureError, match="repeats attention with other arrays"), capture():
        checkpoint(noisy, x, use_reentrant=True, preserve_rng_state=False).sum().backward()
    assert functional.scaled_dot_product_attention is USUAL[0]


def test_compiled_modules_run_eagerly_in_the_block_and_compiled_after_it():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    net = model({}, {"grouped": True})
    plain = inputs()
    step = torch.compile(net, backend=backend)
    step(plain)
    before = len(compiled)
    with capture() as taken:
        step(plain).square().mean().backward()
    for one, layer in zip(taken.layers.values(), net, strict=True):
        agree(one, layer.seen[-1], 1)
    assert before > 0
    assert len(compiled) == before
    torch.compile(net[1], backend=backend)(plain)
    assert len(compiled) > before


def seen_by(mask):
    return torch.where(mask, 0.0, -torch.inf)


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
PADDING = (torch.arange(T) < 9)[None, None, None].expand(B, 1, 1, T)


@pytest.mark.parametrize(
    ("mask", "is_causal", "rows"),
    [
        (CAUSAL, True, T),
        (seen_by(CAUSAL), True, T),
        (CAUSAL.expand(B, 1, T, T), True, T),
        (PADDING, False, 9),
        (PADDING & CAUSAL, True, 9),
    ],
)
def test_masks_are_kept_as_they_were_and_read_by_diagnose(mask, is_causal, rows, tmp_path):
    q, k, v = torch.randn(3, B, HEADS, T, SIZE, requires_grad=True)
    with capture(None) as taken:
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o.sum().backward()
    kept = taken.layers["layer_00"]["attn_mask"]
    np.testing.assert_array_equal(np.float32(kept), np.broadcast_to(mask.float(), kept.shape))
    taken.save(tmp_path / "a.npz")
    (layer,) = array_file.load(tmp_path / "a.npz")
    assert (bool(layer.is_causal), layer.q.shape[1]) == (is_causal, rows)
    again = attention.dot_product_attention(
        layer.q, layer.k, layer.v, is_causal=is_causal, numerics="exact", implementation="dense"
    )
    np.testing.assert_allclose(again, rows_first(o)[:, :rows], rtol=1e-5, atol=1e-6)


def test_what_changes_scores_is_refused_by_diagnose(tmp_path):
    q = torch.randn(B, HEADS, T, SIZE, requires_grad=True)
    with capture() as taken:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(T, T)).sum()
    taken.save(tmp_path / "a.npz")
    with pytest.raises(DiagnoseError, match="attn_mask adds to the scores"):
        array_file.load(tmp_path / "a.npz")
    with capture() as taken:
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    taken.save(tmp_path / "a.npz")
    (layer,) = array_file.load(tmp_path / "a.npz")
    assert layer.notes == (
        "dropout_p of the call was not kept: rows are judged as if there were none; pass --causal "
        "if the mask is causal",
    )


@pytest.mark.parametrize("shape", [(T, SIZE), (HEADS, T, SIZE), (2, 3, HEADS, T, SIZE)])
def test_axes_before_the_heads_are_any(shape):
    q = torch.randn(*shape, requires_grad=True)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    with capture(None) as taken:
        functional.scaled_dot_product_attention(q, q, q, mask).square().sum().backward()
    (layer,) = taken.layers.values()
    batch = 6 if len(shape) == 5 else 1
    expected = q.detach().reshape(batch, -1, T, SIZE).transpose(1, 2)
    np.testing.assert_array_equal(layer["q"], expected)
    assert layer["do"].shape == layer["q"].shape
    assert layer["attn_mask"].shape in {(1, 1, T, T), (batch, 1, T, T)}


def test_modules_of_torch_itself():
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True)
    x = inputs()
    with capture() as taken:
        layer(x).square().sum().backward()
    (one,) = taken.layers.values()
    w, b = layer.self_attn.in_proj_weight[:WIDTH], layer.self_attn.in_proj_bias[:WIDTH]
    expected = (x @ w.T + b).view(B, T, HEADS, SIZE)[:1].detach()
    np.testing.assert_allclose(one["q"], expected, rtol=1e-5, atol=1e-6)
    assert np.any(one["do"])
    attend = torch.nn.MultiheadAttention(WIDTH, HEADS)
    with pytest.raises(CaptureError, match="call it with need_weights=False"), capture():
        attend(x, x, x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_its_masks(tmp_path):
    """On a CPU flex_attention has no backward pass in PyTorch, so only the forward pass runs."""
    q, k, v = torch.randn(3, B, HEADS, T, SIZE)
    mask = flex.create_block_mask(lambda b, h, t, s: s <= t, None, None, T, T, device="cpu")
    run = torch.compile(flex.flex_attention, backend="eager")
    with torch.no_grad(), capture(None) as taken:
        o = run(q, k, v, block_mask=mask, scale=0.5)
        flex.flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    first, second = taken.layers.values()
    np.testing.assert_array_equal(first["attn_mask"][0, 0], CAUSAL.numpy())
    assert "attn_mask" not in second
    assert second["k"].shape == (B, T, 2, SIZE)
    taken.save(tmp_path / "a.npz")
    layer = array_file.load(tmp_path / "a.npz")[0]
    again = attention.dot_product_attention(
        layer.q, layer.k, layer.v, scale=layer.scale, is_causal=layer.is_causal, numerics="exact"
    )
    np.testing.assert_allclose(again, rows_first(o), rtol=1e-5, atol=1e-6)
    with torch.no_grad(), capture() as taken:
        flex.flex_attention(q, k, v, score_mod=lambda score, b, h, t, s: score + t - s)
    taken.save(tmp_path / "a.npz")
    with pytest.raises(DiagnoseError, match="score_mod changes scores, and is not read"):
        array_file.load(tmp_path / "a.npz")


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in with the interface of flash_attn: rows first, causal from the last row and key."""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                        window_size=(-1, -1), softcap=0.0, alibi_slopes=None):  # fmt: skip
        rows, keys = q.shape[1], k.shape[1]
        mask = torch.ones(rows, keys, dtype=torch.bool)
        if causal:
            mask = mask.tril(keys - rows)
        if window_size[0] >= 0:
            mask = mask.triu(keys - rows - window_size[0])
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return USUAL[0](*heads_first, mask, scale=softmax_scale, enable_gqa=True).transpose(1, 2)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q):
        raise AssertionError

    module = types.ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    user = types.ModuleType("model_of_a_user")
    user.attend = flash_attn_func
    monkeypatch.setitem(sys.modules, "model_of_a_user", user)
    return types.SimpleNamespace(module=module, user=user, function=flash_attn_func)


@pytest.mark.parametrize(
    ("keys", "options", "window", "notes"),
    [
        (T, {"causal": True, "softmax_scale": 0.5}, None, 0),
        (T, {"causal": True, "window_size": (3, 0)}, (3, 0), 0),
        (T, {}, None, 0),
        (T, {"dropout_p": 0.1}, None, 1),
    ],
)
def test_flash_attn_under_whatever_name(flash_attn, keys, options, window, notes, tmp_path):
    q = torch.randn(B, T, HEADS, SIZE, requires_grad=True)
    k, v = torch.randn(2, B, keys, 2, SIZE)
    with capture(None) as taken:
        o = flash_attn.user.attend(q, k, v, **options)
        o.retain_grad()
        o.square().sum().backward()
    assert flash_attn.user.attend is flash_attn.module.flash_attn_func is flash_attn.function
    np.testing.assert_array_equal(taken.layers["layer_00"]["do"], o.grad)
    taken.save(tmp_path / "a.npz")
    (layer,) = array_file.load(tmp_path / "a.npz")
    assert (layer.is_causal, layer.window) == (options.get("causal", False), window)
    assert len(layer.notes) == notes
    again = attention.dot_product_attention(
        layer.q, layer.k, layer.v, scale=layer.scale, is_causal=layer.is_causal,
        local_window_size=layer.window, numerics="exact", implementation="dense",
    )  # fmt: skip
    np.testing.assert_allclose(again, o.detach(), rtol=1e-5, atol=1e-6)


def test_flash_attn_from_the_end_and_what_is_not_read(flash_attn, tmp_path):
    q, k = torch.randn(1, 4, 2, SIZE), torch.randn(1, T, 2, SIZE)
    with capture() as taken:
        flash_attn.module.flash_attn_func(q, k, k, causal=True, window_size=(5, -1))
    expected = np.tri(4, T, T - 4, dtype=bool) & ~np.tri(4, T, T - 4 - 6, dtype=bool)
    np.testing.assert_array_equal(taken.layers["layer_00"]["attn_mask"][0, 0], expected)
    with capture() as taken:
        flash_attn.module.flash_attn_func(k, k, k, softcap=30.0)
    taken.save(tmp_path / "a.npz")
    assert array_file.load(tmp_path / "a.npz")[0].soft_cap == 30
    with pytest.raises(CaptureError, match="flash_attn_varlen_func was called, which"), capture():
        flash_attn.module.flash_attn_varlen_func(q, k, k, None)


def test_a_block_without_attention_says_so():
    with (
        pytest.raises(CaptureError, match=r"nothing was captured: .*attn_implementation"),
        capture(),
    ):
        torch.ones(2, requires_grad=True).sum().backward()
    with pytest.raises(ValueError, match="sequences must be at least 1, or None for all, got 0"):
        capture(sequences=0).__enter__()
    parts = [torch.randn(n, HEADS, SIZE) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(CaptureError, match="a nested tensor reached"), capture():
        functional.scaled_dot_product_attention(nested, nested, nested)


WORDS, LENGTH = 50, 40
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS,
         "num_attention_heads": 4, "max_position_embeddings": LENGTH}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": 8, "query_pre_attn_scalar": 64, "sliding_window_pattern": 2}
COMPRESSED = SHAPE | {"moe_intermediate_size": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
                      "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                      "num_key_value_heads": 4, "first_k_dense_replace": 2}  # fmt: skip
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": WORDS, "n_positions": LENGTH,
         "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
MODELS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", SMALL),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOWED),
    "DeepseekV3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", COMPRESSED),
    "Bert": ("BertForMaskedLM", "BertConfig", SHAPE),
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face(name, half, padding, tmp_path):
    """O and dO are checked against the input of the output projection and its gradient."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    model_class, config, options = MODELS[name]
    net = getattr(transformers, model_class)(getattr(transformers, config)(**options)).eval()
    ends = ("attn.c_proj", "self_attn.o_proj", "attention.output.dense")
    projections = [m for path, m in net.named_modules() if path.endswith(ends)]
    seen = {}
    for i, projection in enumerate(projections):
        projection.register_forward_hook(
            lambda _, inputs, __, i=i: seen.update({f"o_{i}": inputs[0].detach()})
        )
        projection.register_full_backward_hook(
            lambda _, grads, __, i=i: seen.update({f"do_{i}": grads[0].detach()})
        )
    tokens = torch.randint(1, WORDS, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    if padding:
        batch["attention_mask"] = (torch.arange(LENGTH) >= padding).long().expand(2, LENGTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plain = net(**batch).loss
        with capture(None) as taken:
            loss = net(**batch).loss
            loss.backward()
        assert loss == plain
    taken.save(tmp_path / "step.npz")
    layers = array_file.load(tmp_path / "step.npz")
    assert [layer.name for layer in layers] == ["layer_00", "layer_01"]
    assert {layer.window for layer in layers} == {None, (7, 0) if name == "Gemma3" else None}
    for i, layer in enumerate(layers):
        assert bool(layer.is_causal) is (name != "Bert")
        assert (layer.x is not None) is (name in ("GPT2", "Bert"))
        assert layer.q.dtype.name == ("bfloat16" if half else "float32")
        assert layer.q.shape[1] == LENGTH - padding
        o = attention.dot_product_attention(
            layer.q, layer.k, layer.v, scale=layer.scale, is_causal=bool(layer.is_causal),
            local_window_size=layer.window, numerics="exact", implementation="dense",
        )  # fmt: skip
        expected = {w: seen[f"{w}_{i}"].float().numpy().reshape(2, LENGTH, 4, -1)[:, padding:]
                    for w in ("o", "do")}  # fmt: skip
        size = expected["o"].shape[-1]
        # O is rounded to bfloat16 and P̄ is too, which makes two errors of 2^-8.
        tolerance = {"rtol": 0, "atol": (2**-7 if half else 1e-5) * np.abs(expected["o"]).max()}
        np.testing.assert_allclose(np.float32(o)[..., :size], expected["o"], **tolerance)
        np.testing.assert_array_equal(np.float32(layer.do)[..., :size], expected["do"])
        assert np.any(layer.do)
