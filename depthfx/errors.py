"""One class for each mistake a user can make; every text names the value, what is allowed and what to do."""

from __future__ import annotations

# What code of others (a model, a compiler, a loader) raises where it was not written for what it is given.
FOREIGN_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError, OSError, ImportError)


class DepthfxError(Exception):
    """Base of all errors raised on purpose by depthfx."""


class SettingError(DepthfxError, ValueError):
    """A setting, an override or a ``DEPTHFX_*`` variable has a name or a value that is not allowed."""


class UnsupportedModelError(DepthfxError, ValueError):
    """The model cannot be compiled: not a decoder, on the meta device, quantised, hooked, or not recognised."""


class UnsupportedOptionError(DepthfxError, NotImplementedError):
    """A generation option is outside what the engine does (beam search, assisted decoding, ...)."""


class InvalidRequestError(DepthfxError, ValueError):
    """One request is malformed: empty prompt, ids outside the vocabulary, longer than the context, ..."""


class RequestTooLargeError(InvalidRequestError):
    """One request can never fit the KV pool, whatever else runs."""


class NonFiniteLogitsError(DepthfxError, ArithmeticError):
    """The model produced NaN for one request; only that request ends."""


class MemoryBudgetError(DepthfxError, MemoryError):
    """The memory budget leaves no room for the weights or for one KV block."""


class PhysicalMemoryError(DepthfxError, MemoryError):
    """Base of what a physical backend raises; the backend's state is as it was before the call."""


class BackendUnavailableError(PhysicalMemoryError):
    """The backend cannot work on this machine: no such device, driver, package or system call."""


class MemoryRequestError(PhysicalMemoryError, ValueError):
    """A size, offset, shape, dtype or access is not allowed: not a multiple of the granularity, out of bounds, ..."""


class MemoryStateError(PhysicalMemoryError):
    """The call does not fit the state: mapped twice, not mapped, released, freed, or still seen by a tensor."""


class OutOfPhysicalMemoryError(PhysicalMemoryError):
    """There is not enough free memory, or the backend's capacity is spent."""


class DriverError(PhysicalMemoryError):
    """A call of the driver or the operating system failed; ``call`` and ``code`` are its name and its error's name."""

    def __init__(self, call: str, code: str, what: str) -> None:
        super().__init__(f"{call} failed with {code}: {what}")
        self.call = call
        self.code = code


class HostMemoryError(DepthfxError, MemoryError):
    """The host cannot hold or pin its copy of residuals or of evicted KV blocks."""


class RestoreError(DepthfxError, RuntimeError):
    """A unit's residual could not be copied back; ``unit`` names it, or is None where the worker as a whole failed."""

    def __init__(self, what: str, unit: int | None = None) -> None:
        super().__init__(what)
        self.unit = unit


class GraphError(DepthfxError, RuntimeError):
    """A pass left a graph that breaks a rule, or found one that it cannot rewrite; names the node."""


class FormatError(DepthfxError, ValueError):
    """A weight does not fit a nested format, or is not a 16-bit matrix."""


class CheckpointError(DepthfxError, ValueError):
    """A folder of weights is missing, incomplete, altered, of another version, or belongs to another model."""


class SkipperError(DepthfxError, ValueError):
    """A skipper that cannot be used: it breaks its contract, does not fit the model, or its checkpoint is wrong."""


class RegistryError(DepthfxError, KeyError):
    """A plug-in name is used twice or is unknown."""

    def __str__(self) -> str:  # KeyError would print the repr of the text
        return str(self.args[0]) if self.args else ""


class InternalError(DepthfxError, AssertionError):
    """An invariant of depthfx does not hold; always a defect of depthfx, never of the user."""
