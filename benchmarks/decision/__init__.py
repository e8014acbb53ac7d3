"""The scheduler's benchmark: hash, match, decide, queue and KV events, in one process; `--help` lists its rows.

Each module has some rows, as functions of the amount of work. Goals that depend on the machine are multiples of another
figure of the same run: a peer's, or a simpler step of ours.
"""
