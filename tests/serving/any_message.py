"""Messages of every kind that are well formed and otherwise mean anything, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.protocol.messages import encode


def messages(union: Any, tickets: Sequence[int]) -> st.SearchStrategy[Any]:
    """Of a union of messages, as they are after the wire. tickets: that most of them are about."""
    decoder = msgspec.msgpack.Decoder(union)
    return _values(msgspec.inspect.type_info(union), tickets).map(lambda message: decoder.decode(encode(message)[1:]))


def _values(kind: Any, tickets: Sequence[int]) -> st.SearchStrategy[Any]:
    info = msgspec.inspect
    match kind:
        case info.UnionType(types=types):
            return st.sampled_from(types).flatmap(lambda each: _values(each, tickets))
        case info.DataclassType(cls=cls) if cls is SamplingParams:  # which refuses what it cannot mean
            return st.sampled_from([SamplingParams(max_tokens=3), SamplingParams(max_tokens=2, logprobs=1, n=2)])
        case info.StructType(cls=cls, fields=fields) | info.DataclassType(cls=cls, fields=fields):
            return st.builds(cls, **{each.name: _field(each, tickets) for each in fields})
        case info.VarTupleType(item_type=item) | info.ListType(item_type=item):
            sizes = {"min_size": kind.min_length or 0, "max_size": kind.max_length or 3}
            found = st.lists(_values(item, tickets), **sizes)
            return found.map(tuple) if isinstance(kind, info.VarTupleType) else found
        case info.TupleType(item_types=items):
            return st.tuples(*(_values(item, tickets) for item in items))
        case info.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key, tickets), _values(value, tickets), max_size=2)
        case info.IntType(ge=least, lt=beyond):
            low, high = -(2**63) if least is None else least, 2**64 if beyond is None else beyond
            return st.integers(max(low, -2), 5) | st.integers(low, high - 1)
        case info.FloatType(gt=beyond):
            return st.floats() if beyond is None else st.floats(beyond, exclude_min=True)
        case info.BoolType():
            return st.booleans()
        case info.StrType():
            return st.text(st.characters(codec="utf-8"), max_size=4)
        case info.BytesType():
            return st.binary(max_size=5)
        case info.NoneType():
            return st.none()
        case info.LiteralType(values=values):
            return st.sampled_from(values)
    raise AssertionError(kind)


def _field(field: Any, tickets: Sequence[int]) -> st.SearchStrategy[Any]:
    if field.name == "ticket":
        return st.sampled_from(tickets)
    return _values(field.type, tickets)
