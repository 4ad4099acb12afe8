"""The page of `lowprec_attn.torch` is built without PyTorch, which is large."""

from typing import Any

from sphinx.ext.autodoc.mock import _MockObject


def setup(app: Any) -> dict[str, bool]:
    """Sphinx's entry."""
    app.config.autodoc_mock_imports = ["torch"]
    # Sphinx's stand-in lacks the operator of `Tensor | None`.
    _MockObject.__or__ = lambda self, other: self
    return {"parallel_read_safe": True}
