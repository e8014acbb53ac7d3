// Calls one tool by Vercel's AI SDK, and prints the calls: node ask.mjs URL MODEL STREAM QUESTION_AS_JSON
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, jsonSchema, streamText, tool } from 'ai'

const [url, model, stream, given] = process.argv.slice(2)
const { question, name, description, parameters, maxTokens } = JSON.parse(given)
const provider = createOpenAICompatible({ name: 'fleet', baseURL: `${url}/v1`, apiKey: 'any' })
const ask = {
  model: provider(model),
  prompt: question,
  temperature: 0,
  maxOutputTokens: maxTokens,
  maxRetries: 0,
  tools: { [name]: tool({ description, inputSchema: jsonSchema(parameters) }) },
  toolChoice: { type: 'tool', toolName: name },
}
const answer = stream === 'true' ? streamText(ask) : await generateText(ask)
if (stream === 'true') {
  for await (const part of answer.fullStream) if (part.type === 'error') throw part.error
}
const calls = await answer.toolCalls
console.log(JSON.stringify(calls.map(call => [call.toolName, call.input])))
