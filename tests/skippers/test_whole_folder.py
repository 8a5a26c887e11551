"""A result's folder is the old one or the new one, whatever fails, and nothing is left beside it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessExitedException

from depthfx.errors import SkipperError
from depthfx.skippers.flexidepth_checkpoint import save_flexidepth
from depthfx.skippers.train import whole_folder
from depthfx.skippers.train.whole_folder import write_folder
from tests.skippers.train_toys import in_process, model, settings, skipper, train


def fill(text):
    """What writes two files."""

    def write(folder):
        for name in ("a", "b"):
            (folder / name).write_text(text)

    return write


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def exchange(request, monkeypatch):
    """Where the system can swap folders in one step, and where it cannot."""
    if not request.param:
        monkeypatch.setattr(whole_folder, "_exchange", lambda one, other: False)
    return request.param


@pytest.fixture
def place(tmp_path):
    """A folder that was written before, and has other files too."""
    folder = tmp_path / "skipper"
    write_folder(folder, fill("old"))
    (folder / "notes").mkdir()
    (folder / "notes" / "a").write_text("mine")
    return folder


def test_the_new_one_takes_its_place(place, exchange):
    assert whole_folder._exchange(place, place) == exchange
    write_folder(place, fill("new"))
    assert content(place) == {"a": "new", "b": "new", "notes/a": "mine"} and os.listdir(place.parent) == ["skipper"]
    write_folder(place.parent / "deep" / "er", fill("new"))
    assert content(place.parent / "deep" / "er") == {"a": "new", "b": "new"}


def test_what_fails_while_writing_leaves_the_old_one(place, exchange):
    def broken(folder):
        (folder / "a").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SkipperError, match=r"skipper cannot be written \(.*No space.*\); the old one is kept: make room or name another"):
        write_folder(place, broken)
    assert content(place) == {"a": "old", "b": "old", "notes/a": "mine"} and os.listdir(place.parent) == ["skipper"]
    with pytest.raises(SkipperError, match="there is no old one"):
        write_folder(place.parent / "other", broken)
    assert os.listdir(place.parent) == ["skipper"]


def test_what_fails_while_renaming_leaves_the_old_one(place, monkeypatch):
    monkeypatch.setattr(whole_folder, "_exchange", lambda one, other: False)
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: rename(a, b) if a.name != ".skipper.new" else os.rename(a / "nothing", b))
    with pytest.raises(SkipperError, match="the old one is kept"):
        write_folder(place, fill("new"))
    assert content(place) == {"a": "old", "b": "old", "notes/a": "mine"} and os.listdir(place.parent) == ["skipper"]


def test_a_link_stays_a_link(place):
    (place.parent / "link").symlink_to(place)
    write_folder(place.parent / "link", fill("new"))
    assert (place.parent / "link").is_symlink() and content(place)["a"] == "new"


def killed(rank, folder):
    """A process that dies between its two renames."""
    whole_folder._exchange = lambda one, other: False
    rename = Path.rename
    Path.rename = lambda a, b: rename(a, b) if a.name != ".skipper.new" else os.kill(os.getpid(), signal.SIGKILL)
    write_folder(folder, fill("new"))


def test_a_killed_process_loses_nothing(place):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        in_process(killed, place)
    assert sorted(os.listdir(place.parent)) == [".skipper.new", ".skipper.old"]
    with pytest.raises(SkipperError, match="the old one is kept"):
        write_folder(place, lambda folder: os.rename(folder / "nothing", folder / "a"))
    assert content(place) == {"a": "old", "b": "old", "notes/a": "mine"} and os.listdir(place.parent) == ["skipper"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_may_read_a_result_is_the_umasks_choice(tmp_path, umask):
    before = os.umask(umask)
    try:
        of = model()
        save_flexidepth(skipper(of), tmp_path / "skipper", of)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "skipper").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~umask)


def test_a_full_disk_keeps_the_old_result(tmp_path):
    """The operating system refuses to write more than some bytes into one file; the run's state is written before."""
    of, how = model(), settings(2)
    train(tmp_path, how, of)
    result = tmp_path / "skipper"
    assert (result / "model.safetensors").stat().st_size > 20_000
    (result / "model.safetensors").write_bytes(b"the old one")
    before = {p.name: p.read_bytes() for p in result.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SkipperError, match=r"skipper cannot be written \(.*\); the old one is kept: make room"):
            train(tmp_path, how, of)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {p.name: p.read_bytes() for p in result.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "skipper", "state.pt"], "nothing is left over"
    train(tmp_path, how, of)
    assert (result / "model.safetensors").stat().st_size > 20_000
