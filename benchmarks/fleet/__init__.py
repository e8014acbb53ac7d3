"""Routers as processes before the same sim engines, with real sockets: ours, and the peers' own binaries.

workload.py  a trace's requests as chats, an eighth as long      replay.py   sends them when due, and times them
engines.py   the engines' own counters and caches                figures.py  what one contender's run comes to
"""
