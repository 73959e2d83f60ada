"""Traces, workloads and reports: what is played against kvcoord, and how it is judged. Knows nothing of sockets."""
