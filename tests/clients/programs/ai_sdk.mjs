// AI SDK: texts, streams and tools, by its three providers.
import { createRequire } from "node:module"
import { generateText, streamText, tool, stepCountIs } from "ai"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { createAnthropic } from "@ai-sdk/anthropic"
import { z } from "zod"
const { STUB, MODEL } = process.env
const require = createRequire(import.meta.url)
console.log("version " + require("./node_modules/ai/package.json").version)
const baseURL = `${STUB}/v1`, apiKey = "key-of-nobody"
const models = [createOpenAICompatible({ name: "fleet", baseURL, apiKey })(MODEL), createOpenAI({ baseURL, apiKey })(MODEL),
  createOpenAI({ baseURL, apiKey }).chat(MODEL), createAnthropic({ baseURL, apiKey })(MODEL)]
const tools = { read_note: tool({ description: "Read a note", inputSchema: z.object({ name: z.string() }),
  execute: async () => "The key is under the mat." }) }
for (const model of models) {
  const ask = { model, maxOutputTokens: 16, maxRetries: 0 }
  await generateText({ ...ask, prompt: "Where is the key?", tools, stopWhen: stepCountIs(3) })
  const stream = streamText({ ...ask, system: "Be brief.", messages: [{ role: "user", content: "Where is the key?" }] })
  for await (const _ of stream.textStream) { /* read */ }
}
