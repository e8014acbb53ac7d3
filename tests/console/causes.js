async () => {
  const { spells, changesBefore } = await import("/ui/assets/pages/causes.js");
  const at = Array.from({ length: 40 }, (_, index) => 1000 + 5 * index), zero = at.map(() => 0);
  const codes = {
    "500 new": zero.map((_, index) => (index >= 30 ? 2 : index < 3 ? 1 : 0)), "429 old": at.map(() => 1),
    "503 over": zero.map((_, index) => (index === 10 ? 1 : 0)), "499": at.map(() => 9),
  };
  const found = spells({ at, codes }, 5);
  const entry = (seconds) => ({ at: new Date(seconds * 1000).toISOString() });
  const near = changesBefore([entry(1160), entry(1149), entry(1100), entry(100)], 1150, 5);
  return { found, near: near.map((one) => Date.parse(one.at) / 1000) };
}
