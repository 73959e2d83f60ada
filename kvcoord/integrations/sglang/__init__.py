"""SGLang's hierarchical cache, with every decision agreed by all ranks: `--radix-cache-backend kvcoord`.

Theory of operation. SGLang's ranks run the same scheduler over the same requests, so their trees stay equal as long as
every change follows from what all ranks know. `KvcoordRadixCache` takes the changes that depend on one rank's own
pools, copies, storage or clock, and makes each follow from a verdict of the group:

* one frame a scheduler step goes out: votes, ended copies by id, free slots, a digest. The verdict on it is applied
  `lag` steps later, at the same step on every rank (`rounds`);
* a write to the host is an intent: its node is locked, its host slots are reserved at the step's frame, and the copy
  starts when all ranks could reserve (`writes`);
* what cannot wait a step (load-back, eviction, write-back, retraction) is decided on the agreed capacity: the smallest
  free count of all ranks, minus what was taken since (`capacity`, `allocations`);
* a model with a sliding window or recurrent states has more pools than the KV's: an operation takes its slots in all of
  them or in none (`components`);
* a copy ends, for the tree, when it has ended on all ranks (`copies`); the same for what storage brings (`storage`).

The module of the entry point is `plugin`. Importing this package imports neither sglang nor torch.
"""
