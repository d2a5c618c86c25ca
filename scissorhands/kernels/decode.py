"""Triton kernels: one new token a row attends to the slots in use, exact or packed, and leaves its evidence.

Work is split over slots as in flash-decoding (Dao et al. 2023): programs of :func:`attend_split` go once over the keys
and values of a piece of a row each, and :func:`finish` puts the pieces together. A slot's share of the attention is
only known once all pieces are, so the scores are kept until then: four bytes a slot and query head, where a slot's key
and value take hundreds. So evidence costs no second look at the keys.

Where a row's tensors lie is read from a table (:mod:`scissorhands.kernels.table`), so that a captured step stays right
when a pool moves, and rows of several pools can be one batch. A row is cut by its own capacity alone, and every sum has
one order, so whatever else is in the batch changes no number. A slot below zero stands for a place without a row.

With ``TRITON_INTERPRET=1`` all of it runs on a CPU.
"""

import triton
import triton.language as tl

# Fields of the table, each ``[rows]`` int64: addresses of a row's tensors, then its capacity in slots, and how many
# slots one program goes over.
KEYS = tl.constexpr(0)
VALUES = tl.constexpr(1)
POSITIONS = tl.constexpr(2)
MASS = tl.constexpr(3)
LOW = tl.constexpr(4)
WINDOW = tl.constexpr(5)
LAST = tl.constexpr(6)
WEIGHT = tl.constexpr(7)
CAPACITY = tl.constexpr(8)
PIECE = tl.constexpr(9)
FIELDS = 10


@triton.jit
def _field(table, field: tl.constexpr, row, rows):
    return tl.load(table + field * rows + row)


@triton.jit
def _at(table, field: tl.constexpr, row, rows, kind: tl.constexpr):
    """Return a pointer to a row's tensor; all of them begin at whole slots of at least two bytes."""
    return _field(table, field, row, rows).to(tl.pointer_type(kind))


@triton.jit
def _vectors(
    base,
    at,
    used,
    head_dim: tl.constexpr,
    kind: tl.constexpr,
    product: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    bend: tl.constexpr,
):
    """Return the vectors ``[block, head_dim]`` at slots ``at`` in the codec's basis, without the scale of each."""
    element = tl.arange(0, head_dim)
    if bits == 0:
        where = base.to(tl.pointer_type(kind)) + at[:, None] * head_dim + element[None, :]
        return tl.load(where, mask=used[:, None], other=0.0).to(product)
    width: tl.constexpr = head_dim * bits // 8
    start: tl.constexpr = 4 * (head_dim // group) if group > 0 else 2
    row_bytes: tl.constexpr = start + width
    data = base.to(tl.pointer_type(tl.uint8)) + at[:, None] * row_bytes + start
    packed = tl.load(data + (element % width)[None, :], mask=used[:, None], other=0).to(tl.int32)
    level = ((packed >> ((element // width) * bits)[None, :]) & (2**bits - 1)).to(tl.float32)
    if group > 0:
        ranges = base.to(tl.pointer_type(tl.float16)) + at[:, None] * (row_bytes // 2) + (element // group)[None, :]
        low = tl.load(ranges, mask=used[:, None], other=0.0).to(tl.float32)
        step = tl.load(ranges + head_dim // group, mask=used[:, None], other=0.0).to(tl.float32)
        return (low + step * level).to(product)
    twice = 2 * level - (2**bits - 1)
    if bend != 0.0:
        twice += bend * twice * twice * twice
    return twice.to(product)


@triton.jit
def _scales(base, at, used, head_dim: tl.constexpr, bits: tl.constexpr):
    """Return the scale of each vector, ``[block]`` float32."""
    row_bytes: tl.constexpr = 2 + head_dim * bits // 8
    where = base.to(tl.pointer_type(tl.bfloat16)) + at * (row_bytes // 2)
    return tl.load(where, mask=used, other=0.0).to(tl.float32)


@triton.jit
def append(
    table,
    slots,
    steps,
    keys,
    values,
    rows,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    padded: tl.constexpr,
    kind: tl.constexpr,
):
    """Put each row's new key and value, and its position, in its slot; a program a row and KV head.

    Args:
        table: ``[fields, rows]`` int64.
        slots: ``[rows]`` where the new token goes.
        steps: ``[rows]`` its position.
        keys: ``[rows, heads, key_width]``, as they are stored.
        values: ``[rows, heads, value_width]``.
        rows: Places of the batch.
        heads: KV heads.
        key_width: Elements of a stored key, and
        value_width: of a stored value.
        padded: A power of two that is no less.
        kind: Type of these elements.
    """
    place = tl.program_id(0)
    row = place // heads
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    at = (place % heads) * _field(table, CAPACITY, row, rows) + slot
    element = tl.arange(0, padded)
    key = tl.load(keys + place * key_width + element, mask=element < key_width)
    tl.store(_at(table, KEYS, row, rows, kind) + at * key_width + element, key, mask=element < key_width)
    value = tl.load(values + place * value_width + element, mask=element < value_width)
    tl.store(_at(table, VALUES, row, rows, kind) + at * value_width + element, value, mask=element < value_width)
    tl.store(_at(table, POSITIONS, row, rows, tl.int32) + at, tl.load(steps + row).to(tl.int32))


@triton.jit
def attend_split(
    table,
    slots,
    queries,
    scores,
    tops,
    totals,
    sums,
    scaling,
    rows,
    pieces,
    extent,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
    product: tl.constexpr,
    key_bits: tl.constexpr,
    key_group: tl.constexpr,
    key_bend: tl.constexpr,
    value_bits: tl.constexpr,
    value_group: tl.constexpr,
    value_bend: tl.constexpr,
    weighted: tl.constexpr,
):
    """Attend to one piece of one head's slots; a program a row and KV head, and piece.

    Args:
        table: ``[fields, rows]`` int64.
        slots: ``[rows]``, the last slot in use of each.
        queries: ``[rows, heads, group, head_dim]``, in the basis of the keys.
        scores: ``[rows, heads, group, extent]`` float32, written.
        tops: ``[rows, heads, pieces, group]`` float32, written: the largest score, and
        totals: the same shape, the sum of the exponentials below it.
        sums: ``[rows, heads, pieces, group, head_dim]`` float32, written: the values by these exponentials.
        scaling: Factor on the products.
        rows: Places of the batch.
        pieces: Pieces that a row has at most.
        extent: Slots that a row has at most.
        heads: KV heads.
        group: Query heads to each.
        padded: A power of two that is no less than the group, at least 16.
        head_dim: Elements of a key.
        block: Slots at once.
        kind: Number type of exact keys and values.
        product: Number type in which products are taken.
        key_bits: Bits of a packed key's element; 0 for exact keys.
        key_group: Elements with a minimum and a step; 0 for a scale a vector.
        key_bend: How a scaled key's numbers bend.
        value_bits: The same of values.
        value_group: The same.
        value_bend: The same.
        weighted: Whether slots have weights.
    """
    place = tl.program_id(0)
    piece = tl.program_id(1)
    row = place // heads
    end = tl.load(slots + row).to(tl.int32) + 1
    size = _field(table, PIECE, row, rows).to(tl.int32)
    begin = piece * size
    if begin >= end:
        return
    end = tl.minimum(end, begin + size)
    first = (place % heads) * _field(table, CAPACITY, row, rows)
    keys = tl.multiple_of(_field(table, KEYS, row, rows), 16)
    values = tl.multiple_of(_field(table, VALUES, row, rows), 16)
    member = tl.arange(0, padded)
    element = tl.arange(0, head_dim)
    query = tl.load(
        queries + (place * group + member)[:, None] * head_dim + element[None, :],
        mask=(member < group)[:, None],
        other=0.0,
    ).to(product)
    top = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    summed = tl.zeros([padded, head_dim], tl.float32)
    for start in range(begin, end, block):
        slot = start + tl.arange(0, block)
        used = slot < end
        at = first + slot
        key = _vectors(keys, at, used, head_dim, kind, product, key_bits, key_group, key_bend)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if key_bits > 0 and key_group == 0:
            score *= _scales(keys, at, used, head_dim, key_bits)[None, :]
        if weighted:
            score += tl.load(_at(table, WEIGHT, row, rows, tl.float32) + at, mask=used, other=0.0)[None, :]
        score = tl.where(used[None, :], score, float("-inf"))
        tl.store(
            scores + (place * group + member).to(tl.int64)[:, None] * extent + slot[None, :],
            score,
            mask=(member < group)[:, None] & used[None, :],
        )
        higher = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - higher)
        share = tl.exp(score - higher[:, None])
        total = total * shrink + tl.sum(share, axis=1)
        if value_bits > 0 and value_group == 0:
            share *= _scales(values, at, used, head_dim, value_bits)[None, :]
        value = _vectors(values, at, used, head_dim, kind, product, value_bits, value_group, value_bend)
        summed = summed * shrink[:, None] + tl.dot(share.to(product), value, input_precision="ieee")
        top = higher
    own = (place * pieces + piece) * group + member
    tl.store(tops + own, top, mask=member < group)
    tl.store(totals + own, total, mask=member < group)
    tl.store(sums + own[:, None] * head_dim + element[None, :], summed, mask=(member < group)[:, None])


@triton.jit
def finish(
    table,
    slots,
    steps,
    scores,
    tops,
    totals,
    sums,
    output,
    rows,
    pieces,
    extent,
    half,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    observe: tl.constexpr,
    low: tl.constexpr,
    window: tl.constexpr,
    last: tl.constexpr,
):
    """Put the pieces of a head together, and add the group's mean attention to the evidence of one piece's slots.

    Args:
        table: As in :func:`attend_split`, and so are the others that are not named here.
        slots: The same.
        steps: ``[rows]``, tokens that each row had seen.
        scores: What it has written, and
        tops: the largest,
        totals: their exponentials' sums,
        sums: and the values'.
        output: ``[rows, heads, group, head_dim]``, written by the programs of the first piece.
        rows: Places of the batch.
        pieces: Pieces that a row has at most.
        extent: Slots that a row has at most.
        half: Queries of a bucket.
        heads: KV heads.
        group: Query heads to each.
        padded: As above.
        head_dim: Elements of a key.
        block: Slots at once.
        observe: Whether evidence is gathered: mass always, and
        low: low counts in two buckets,
        window: mass in two buckets,
        last: the attention of this query alone.
    """
    place = tl.program_id(0)
    piece = tl.program_id(1)
    row = place // heads
    length = tl.load(slots + row).to(tl.int32) + 1
    size = _field(table, PIECE, row, rows).to(tl.int32)
    begin = piece * size
    if begin >= length and piece > 0:
        return
    member = tl.arange(0, padded)
    element = tl.arange(0, head_dim)
    own = member < group
    first_part = place * pieces * group + member
    parts = tl.cdiv(length, size)
    top = tl.full([padded], float("-inf"), tl.float32)
    for part in range(parts):
        top = tl.maximum(top, tl.load(tops + first_part + part * group, mask=own, other=0.0))
    total = tl.zeros([padded], tl.float32)
    summed = tl.zeros([padded, head_dim], tl.float32)
    for part in range(parts):
        at_part = first_part + part * group
        share = tl.exp(tl.load(tops + at_part, mask=own, other=0.0) - top)
        total += share * tl.load(totals + at_part, mask=own, other=1.0)
        if piece == 0:
            where = sums + at_part[:, None] * head_dim + element[None, :]
            summed += share[:, None] * tl.load(where, mask=own[:, None], other=0.0)
    if piece == 0:
        # A place without a row gets zeros.
        found = summed / tl.where(total > 0, total, 1.0)[:, None]
        where = output + (place * group + member)[:, None] * head_dim + element[None, :]
        tl.store(where, found.to(output.dtype.element_ty), mask=own[:, None])
    if observe:
        first = (place % heads) * _field(table, CAPACITY, row, rows)
        step = tl.load(steps + row).to(tl.int32)
        for start in range(begin, tl.minimum(length, begin + size), block):
            slot = start + tl.arange(0, block)
            used = slot < length
            at = first + slot
            score = tl.load(
                scores + (place * group + member).to(tl.int64)[:, None] * extent + slot[None, :],
                mask=own[:, None] & used[None, :],
                other=float("-inf"),
            )
            mean = tl.sum(tl.exp(score - top[:, None]) / total[:, None], axis=0) / group
            mass = _at(table, MASS, row, rows, tl.float32) + at
            tl.store(mass, tl.load(mass, mask=used) + mean, mask=used)
            bucket = 2 * at + (step // half) % 2
            # A bucket that comes round again begins anew.
            kept = step % half > 0
            if low:
                count = _at(table, LOW, row, rows, tl.uint8) + bucket
                more = (mean < 1.0 / length.to(tl.float32)).to(tl.uint8)
                tl.store(count, tl.load(count, mask=used & kept, other=0) + more, mask=used)
            if window:
                amount = _at(table, WINDOW, row, rows, tl.float32) + bucket
                tl.store(amount, tl.load(amount, mask=used & kept, other=0.0) + mean, mask=used)
            if last:
                tl.store(_at(table, LAST, row, rows, tl.float32) + at, mean, mask=used)
