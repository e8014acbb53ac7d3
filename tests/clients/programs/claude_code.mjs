// Claude Code: a question that its Read tool answers.
import { execFileSync } from "node:child_process"
const { STUB, MODEL, WORK } = process.env
const env = { ...process.env, ANTHROPIC_BASE_URL: STUB, ANTHROPIC_API_KEY: "key-of-nobody", ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_AUTOUPDATER: "1" }
const run = (...words) => execFileSync("claude", words, { cwd: WORK, env, encoding: "utf8" })
console.log("version " + run("--version").split(" ")[0])
console.log(run("-p", "Where is the key?", "--allowedTools", "Read"))
