-- A store as the first schema wrote it, with one of everything.
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE adapters (
    lora_id TEXT PRIMARY KEY, source TEXT NOT NULL, base_model TEXT, digest TEXT, rank INTEGER, size_bytes INTEGER,
    policy TEXT NOT NULL, tenants TEXT, quarantine TEXT, is_deleting INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE aliases (name TEXT PRIMARY KEY, targets TEXT NOT NULL) STRICT;
CREATE TABLE policy (id INTEGER PRIMARY KEY CHECK (id = 1), body TEXT NOT NULL) STRICT;
CREATE TABLE workers (id TEXT PRIMARY KEY, state TEXT NOT NULL, until REAL) STRICT;
CREATE TABLE tombstones (lora_id TEXT PRIMARY KEY, digest TEXT NOT NULL, at REAL NOT NULL) STRICT;
INSERT INTO counters VALUES ('epoch', 7), ('revision', 1800000000000);
INSERT INTO adapters VALUES (
    'sql/v1', 'file:///sql', 'qwen', 'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd', 8, 12,
    '{"loading": "eager", "min_replicas": 2, "max_replicas": 3, "pinned": true, "priority": -5, "weight": 2.5}',
    '["acme"]', NULL, 0
);
INSERT INTO aliases VALUES ('sql', '[["sql/v1", 1.0]]');
INSERT INTO policy VALUES (1, '{"loading": "weighted", "loads_per_worker": 3, "gone_since": 1}');
INSERT INTO workers VALUES ('w0', 'cordoned', NULL), ('w1', 'draining', 17.5);
INSERT INTO tombstones VALUES ('old', 'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee', 1000.0);
PRAGMA user_version = 1;
