async () => {  // figures that pages work out, for made-up answers of the orchestrator
  const { groupedIncidents } = await import("/ui/assets/pages/fleet.js");
  const { slowParts } = await import("/ui/assets/pages/causes.js");
  const { liveBy } = await import("/ui/assets/pages/aliases.js");
  const { losesAll } = await import("/ui/assets/pages/whatif.js");
  const { recentUse, budgetUse } = await import("/ui/assets/pages/tenants.js");
  const total = { requests: 12, refusals: 2, prompt_tokens: 40000, hit_real: 0.25, waited_s: 0.5, cold_starts: 1, cold_s: 2, first_token_s: { p50: 4 } };
  const rows = (...kinds) => kinds.map(([kind, actor, body], index) => ({ id: 9 - index, at: `t${9 - index}`, kind, actor, body }));
  const asked = ["alias_rollout", "ann", { what: "began" }], shifted = ["alias_set", "lorafleet", { why: "rollout: watching step 1" }];
  const watching = ["alias_rollout", "lorafleet", { what: "watching step 1" }], back = ["alias_rollout", "lorafleet", { what: "rolled_back" }];
  const action = (operation, lora_id, worker_id, evict) => ({ operation, lora_id, worker_id, evict });
  const held = { a: ["w2"], b: ["w2"], c: ["w1"], d: ["w1", "w3"], e: [] };
  const adapters = Object.entries(held).map(([lora_id, workers]) => ({ lora_id, workers }));
  const incident = (id, kind, severity, subject) => ({ id, kind, severity, subject, body: {} });
  const incidents = [...Array.from({ length: 9 }, (_, at) => incident(20 - at, "lease_away", "warning", "")), incident(9, "engine_died", "error", "w1"), incident(8, "circuit_opened", "warning", "w1")];
  return {
    incidents: groupedIncidents(incidents).map((one) => [`${one.kind} ${one.subject}`, one.times]),
    parts: slowParts(total, 3000).map(([time, name]) => [name, Math.round(time * 100) / 100]),
    live: [rows(["alias_rollout", "lorafleet", { what: "done" }], shifted, asked), rows(watching, shifted, asked, ["alias_set", "bob", {}]),
      rows(back, ["alias_set", "lorafleet", { why: "error rate" }], watching, shifted, asked), rows(["name_published", "trainer", {}])].map(liveBy).map((one) => one.actor),
    lost: losesAll({ gone: ["w2"], actions: [action("load", "a", "w1", "c")] }, adapters),
    spent: budgetUse({ key_id: "k", tenant: "acme" }, { "key month": { k: { prompt_tokens: 5, completion_tokens: 2, prefill_s: 0.5, decode_s: 1 } }, "tenant month": {}, "tenant day": null }),
    use: recentUse({ requests: 200, codes: { "429 rate_limited": 100 }, prompt_tokens: 400, output_tokens: 100 }),
  };
}
