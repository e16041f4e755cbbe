"""What the functions of this package may assume of their arguments, and the one error for what breaks it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class ArgumentError(ValueError):
    """An argument outside what is allowed.

    Attributes:
        param: name of the offending argument or field.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


def matrix(param: str, values: npt.ArrayLike) -> F64:
    """`values` as float64 [R, gamma] with gamma at least 1; R may be 0.

    Raises:
        ArgumentError: any other shape.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] < 1:
        raise ArgumentError(param, f"must have shape [requests, block size >= 1], not {list(array.shape)}")
    return array


def vector(param: str, values: npt.ArrayLike, size: int) -> F64:
    """`values` as float64 [size].

    Raises:
        ArgumentError: any other shape.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (size,):
        raise ArgumentError(param, f"must have shape [{size}], not {list(array.shape)}")
    return array


def counts(param: str, values: npt.ArrayLike, size: int, highest: int) -> I64:
    """`values` as int64 [size], each in 0..`highest`.

    Raises:
        ArgumentError: another shape, a fraction, or a value out of range.
    """
    array = np.asarray(values)
    if array.shape != (size,):
        raise ArgumentError(param, f"must have shape [{size}], not {list(array.shape)}")
    if size and not np.issubdtype(array.dtype, np.integer):
        raise ArgumentError(param, f"must be integers, not {array.dtype}")
    if size and (array.min() < 0 or array.max() > highest):
        raise ArgumentError(param, f"must be in 0..{highest}, not {array.min()}..{array.max()}")
    return array.astype(np.int64)


def flags(param: str, values: npt.ArrayLike, size: int) -> Bool:
    """`values` as bool [size].

    Raises:
        ArgumentError: another shape or type.
    """
    array = np.asarray(values)
    if array.shape != (size,):
        raise ArgumentError(param, f"must have shape [{size}], not {list(array.shape)}")
    if size and array.dtype != np.bool_:
        raise ArgumentError(param, f"must be booleans, not {array.dtype}")
    return array.astype(np.bool_)


def weight_vector(values: npt.ArrayLike, size: int) -> F64:
    """The weights of `size` requests: positive and finite.

    Raises:
        ArgumentError: otherwise; names `weights`.
    """
    array = vector("weights", values, size)
    if not np.all((array > 0.0) & np.isfinite(array)):
        raise ArgumentError("weights", "must be positive and finite")
    return array


def survival_matrix(param: str, values: npt.ArrayLike) -> F64:
    """A survival [R, gamma]: every row in [0, 1] and never rising.

    A rising row would let a later position overtake an earlier one, and so break non-anticipation.

    Raises:
        ArgumentError: otherwise (NaN included).
    """
    array = matrix(param, values)
    if not np.all((array >= 0.0) & (array <= 1.0)):
        raise ArgumentError(param, "must be in [0, 1] everywhere")
    if not np.all(array[:, 1:] <= array[:, :-1]):
        raise ArgumentError(param, "must not rise along a request's positions")
    return array
