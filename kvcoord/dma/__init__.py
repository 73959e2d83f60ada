"""Moving bytes between tiers behind awaitable transfers. Who owns the bytes is `memory`'s business."""
