"""Training a skipper, FlexiDepth's router and adapter in each routed layer, on a frozen Hugging Face model.

The shortest way, from texts to a served model, with the published recipe:

    data = make_sequences(texts, 512, model, tokenizer)
    skipper = make_skipper(model, "flexidepth", "adapter", gate="mlp")
    result = train_skipper(model, skipper, data, "run")
    model = depthfx.compile(model, skipper=load_skipper(result.folder, model))

`examples/train_skipper.py` goes all the way for one model, with held-out texts, a target for the share that skips, and a plot.
"""

from __future__ import annotations

from depthfx.skippers.train.evaluate import Evaluation, evaluate_skipper
from depthfx.skippers.train.metrics import plot_metrics, read_metrics
from depthfx.skippers.train.own_chats import make_own_chats, make_own_documents
from depthfx.skippers.train.routing import routed_training
from depthfx.skippers.train.sequences import Sequences, documents, make_sequences
from depthfx.skippers.train.settings import RELEASED, STE_HARD, Stage, TrainSettings
from depthfx.skippers.train.settle import Settled, settle_checkpoint, settle_skipper
from depthfx.skippers.train.text_files import find_files, read_files, split_files
from depthfx.skippers.train.trainer import TrainResult, train_skipper
from depthfx.skippers.train.workers import Workers

__all__ = [
    "RELEASED", "STE_HARD", "Evaluation", "Sequences", "Settled", "Stage", "TrainResult", "TrainSettings", "Workers", "documents",
    "evaluate_skipper", "find_files", "make_own_chats", "make_own_documents", "make_sequences", "plot_metrics", "read_files", "read_metrics",
    "routed_training", "settle_checkpoint", "settle_skipper", "split_files", "train_skipper",
]  # fmt: skip
