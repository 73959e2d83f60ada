"""The agreement protocol as pure state machines: events in, effects out.

Theory of operation. A *group* is the ranks that must agree. Each rank runs a `RankMachine`; one coordinator runs a
`CoordinatorMachine` with a `GroupMachine` for each group. Machines never read a clock, a socket or a random number:
time is an argument, messages are structs, and what should happen next is returned.

There are two ways to a decision, and both use the same `Ballot`:

* the *stream*: a vote is sent at once, the decision comes back as soon as it is certain, numbered in one dense
  sequence per group. Engines without lockstep use only this; lockstep engines use it for what cannot wait.
* *rounds*: at its step k each rank sends one frame (votes, acks, free pages, digest) and goes on. When all frames
  of round k are there the coordinator sends verdict k, a function of the frames alone, and every rank applies it at
  the start of its step k + lag.

Only the coordinator turns time into an outcome. What a rank knows survives the coordinator: on joining, each rank
reports what it has seen in its Accept, and the coordinator gives every rank what any rank knows.
"""
