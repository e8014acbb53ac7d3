"""Every policy on a recorded conversation trace: hit ratio, time to first token, goodput, in one table.

engine.py    one vLLM engine as a discrete-event model     blocks.py    its KV blocks
workload.py  the trace: arrivals, sessions, adapters       ideals.py    what any cache could reach
fleet.py     engines, reports and routers on one clock     rules.py     what a peer's rule may see
peers.py, token_peers.py, learned_peers.py   the rules     contenders.py   their names
ours.py      our router                                    measure.py   one run's figures
"""
