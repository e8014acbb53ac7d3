// LibreChat's agents: the package that runs its conversations.
import { createRequire } from "node:module"
import { HumanMessage } from "@langchain/core/messages"
import { tool } from "@langchain/core/tools"
import { Run, Providers } from "@librechat/agents"
const { STUB, MODEL } = process.env
const require = createRequire(import.meta.url)
console.log("version " + require("./node_modules/@librechat/agents/package.json").version)
const note = tool(async () => "The key is under the mat.", { name: "read_note", description: "Read a note",
  schema: { type: "object", properties: { name: { type: "string" } }, required: ["name"] } })
for (const [provider, options] of [
  [Providers.OPENAI, { model: MODEL, apiKey: "key-of-nobody", configuration: { baseURL: `${STUB}/v1` } }],
  [Providers.ANTHROPIC, { model: MODEL, apiKey: "key-of-nobody", clientOptions: { baseURL: STUB } }],
]) {
  const run = await Run.create({ runId: "run-1", graphConfig: { type: "standard",
    llmConfig: { provider, streaming: true, maxRetries: 0, ...options }, tools: [note], instructions: "Be brief." },
    returnContent: true })
  await run.processStream({ messages: [new HumanMessage("Where is the key?")] },
    { configurable: { thread_id: "1" }, version: "v2" })
}
process.exit(0)
