"""What rows do about blocks behind their windows when a block is lacking.

Called by the scheduler before it preempts.
"""

from __future__ import annotations

import numpy as np

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.plan import drop_unseen
from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import IntArray


def drop_unpublished(table: SlotTable, kv: KVCacheManager, slots: IntArray) -> None:
    """Give up blocks that no later token of these slots sees and that are not published yet. A
    block is published with the next step of its row, which may wait for this very block."""
    if kv.has_windows:
        if kv.enable_prefix_caching:
            known = np.minimum(table.num_computed[slots], table.num_settled(slots))
            for i in np.flatnonzero(known // kv.block_size > kv.num_registered[slots]).tolist():
                slot = int(slots[i])
                kv.register(slot, int(known[i]), table.request_at(slot), table.token_ids[slot])
        drop_unseen(table, kv, slots)


def gives_up_blocks(table: SlotTable, kv: KVCacheManager, slot: int) -> bool:
    """True if a row will have blocks to give up once the steps in flight have landed."""
    is_behind = table.num_pending[slot] > 0
    return bool(is_behind) and kv.has_unseen(slot, int(table.num_computed[slot]))
