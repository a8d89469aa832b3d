// The flows of the AI SDK: with @ai-sdk/openai over both APIs, and with @ai-sdk/openai-compatible.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, BUSY, ENOUGH, KEY, MODEL, QUESTION, TOO_LONG, check, refusal, run } from "./flows.mjs";

const KIND = process.argv[5];
const Weather = z.object({ place: z.enum(["Oslo", "Rome"]), days: z.number().int().min(1).max(9) });

function modelAt(baseURL) {
  if (KIND === "compatible") {
    const settings = { name: "penstock", baseURL, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true };
    return createOpenAICompatible(settings)(MODEL);
  }
  const provider = createOpenAI({ baseURL, apiKey: KEY });
  return KIND === "responses" ? provider.responses(MODEL) : provider.chat(MODEL);
}

// With `store`, the SDK would send references to earlier items, which a server without a memory cannot follow.
const providerOptions = { openai: { store: false } };
const asked = { providerOptions, model: modelAt(BASE), prompt: QUESTION, temperature: 0, maxOutputTokens: 16, maxRetries: 0 };

async function chat() {
  const reply = await generateText(asked);
  check(reply.text, "there is an answer");
  check(reply.usage.outputTokens === 16, "usage");
  check(reply.finishReason === "length", reply.finishReason);
}

async function stream() {
  const whole = (await generateText(asked)).text;
  const streamed = streamText(asked);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  check(text === whole, "the stream is the whole");
  check((await streamed.usage).outputTokens === 16, "usage");
}

async function abort() {
  const controller = new AbortController();
  const streamed = streamText({ ...asked, maxOutputTokens: 1000, abortSignal: controller.signal, onError: () => {} });
  for await (const _ of streamed.textStream) controller.abort();
  await chat();
}

async function tools() {
  let called = 0;
  const execute = async () => {
    called += 1;
    return "sunny";
  };
  const weather = tool({ description: "The weather of a place.", inputSchema: Weather, execute });
  const forced = { ...asked, tools: { weather }, maxOutputTokens: ENOUGH, stopWhen: stepCountIs(2) };
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" });
  const reply = await generateText({ ...forced, prepareStep });
  check(called >= 1 && reply.steps.length === 2, "called, and its result sent back");
  const streamed = streamText({ ...forced, prepareStep });
  await streamed.consumeStream();
  check((await streamed.steps).length === 2, "streamed");
}

async function structured() {
  const typed = { ...asked, maxOutputTokens: ENOUGH, output: Output.object({ schema: Weather }) };
  check(Weather.parse((await generateText(typed)).output), "parsed");
  const streamed = streamText(typed);
  await streamed.consumeStream();
  check(Weather.parse(await streamed.output), "streamed");
}

async function turns() {
  const first = await generateText(asked);
  const messages = [{ role: "user", content: QUESTION }, ...first.response.messages, { role: "user", content: "And then?" }];
  check((await generateText({ ...asked, prompt: undefined, messages })).text, "it goes on");
}

async function errors() {
  const error = await refusal(() => generateText({ ...asked, temperature: -1 }));
  check(error.statusCode === 400 && error.isRetryable === false, error);
}

async function too_long() {
  const error = await refusal(() => generateText({ ...asked, prompt: TOO_LONG }));
  check(error.data?.error?.code === "context_length_exceeded", error.responseBody);
}

async function retries() {
  const patient = { ...asked, model: modelAt(BUSY), maxOutputTokens: 60, maxRetries: 20 };
  const replies = await Promise.all([1, 2, 3, 4].map(() => generateText(patient)));
  check(new Set(replies.map((reply) => reply.text)).size === 1, "all are answered alike");
}

const provider = KIND === "compatible" ? "@ai-sdk/openai-compatible" : "@ai-sdk/openai";
const names = { compatible: "AI SDK, compatible", responses: "AI SDK, responses", chat: "AI SDK, chat" };
await run(names[KIND], ["ai", provider], { chat, stream, abort, tools, structured, turns, errors, too_long, retries });
