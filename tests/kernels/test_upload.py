"""Words from host memory by a kernel; tests/gpu has the same beside a busy copy engine."""

import pytest
import torch

from depthfx.lowering import ops


@pytest.mark.parametrize("num_words", [1, 31, 1024, 1025, 4097])
def test_every_word_arrives_and_none_beside(num_words):
    source = torch.randint(-(1 << 31), 1 << 31, (num_words + 3,), dtype=torch.int32, generator=torch.Generator().manual_seed(num_words))
    target = torch.full((num_words + 3,), -7, dtype=torch.int32)
    ops.upload_words(target[:num_words], source[:num_words])
    assert torch.equal(target[:num_words], source[:num_words]) and (target[num_words:] == -7).all()


def test_nothing_is_nothing():
    target = torch.empty(0, dtype=torch.int32)
    ops.upload_words(target, torch.empty(0, dtype=torch.int32))
    assert not target.numel()


@pytest.mark.parametrize(
    ("target", "source", "named"),
    [
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32), r"target is torch.int64 \[4\]"),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), r"source is torch.int32 \[5\]"),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)[::2], r"source is .* contiguous"),
        (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), r"target is torch.int32 \[2, 2\]"),
    ],
)
def test_other_tensors_are_refused(target, source, named):
    with pytest.raises(ValueError, match=named):
        ops.upload_words(target, source)
