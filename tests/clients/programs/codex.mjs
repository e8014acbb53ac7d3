// Codex: a question that its shell answers.
import { execFileSync } from "node:child_process"
const { STUB, MODEL, WORK } = process.env
const env = { ...process.env, KEY: "key-of-nobody" }
const run = (...words) => execFileSync("codex", words, { cwd: WORK, env, encoding: "utf8" })
console.log("version " + run("--version").trim().split(" ").pop())
const provider = `model_providers.stub={name="stub",base_url="${STUB}/v1",env_key="KEY",wire_api="responses"}`
console.log(run("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-c", provider,
  "-c", "model_provider=stub", "-m", MODEL, "Where is the key?"))
