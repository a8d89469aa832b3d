// The flows of `openai` for Node.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, BUSY, ENOUGH, KEY, MODEL, QUESTION, TOO_LONG, check, refusal, run } from "./flows.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const Weather = z.object({ place: z.enum(["Oslo", "Rome"]), days: z.number().int().min(1).max(9) });
const asked = { model: MODEL, temperature: 0, max_completion_tokens: 12, messages: [{ role: "user", content: QUESTION }] };

async function chat() {
  const reply = await client.chat.completions.create(asked);
  check(reply.choices[0].message.content, "there is an answer");
  check(reply.usage.completion_tokens === 12, "usage");
}

async function stream() {
  const whole = (await client.chat.completions.create(asked)).choices[0].message.content;
  let text = "";
  let usage;
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  check(text === whole && usage.completion_tokens === 12, "the stream is the whole");
}

async function abort() {
  const long = await client.chat.completions.create({ ...asked, max_completion_tokens: 1000, stream: true });
  for await (const _ of long) {
    long.controller.abort();
    break;
  }
  await chat();
}

async function tools() {
  const tool = zodFunction({ name: "weather", parameters: Weather });
  const forced = { ...asked, tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_completion_tokens: ENOUGH };
  const { message } = (await client.chat.completions.parse(forced)).choices[0];
  check(Weather.parse(message.tool_calls[0].function.parsed_arguments), "the arguments are the schema's");
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
  const turns = [...asked.messages, message, result];
  check((await client.chat.completions.create({ ...asked, tools: [tool], messages: turns })).choices.length === 1, "it goes on");
}

async function structured() {
  const format = zodResponseFormat(Weather, "weather");
  const reply = await client.chat.completions.parse({ ...asked, max_completion_tokens: ENOUGH, response_format: format });
  check(Weather.parse(reply.choices[0].message.parsed), "parsed");
  const turns = [...asked.messages, reply.choices[0].message, { role: "user", content: "And then?" }];
  check((await client.chat.completions.create({ ...asked, messages: turns })).choices.length === 1, "sent back as parsed");
}

async function responses() {
  const body = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 16 };
  const whole = await client.responses.create(body);
  let text = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  check(text && text === whole.output_text, "the stream is the whole");
  const format = { format: zodTextFormat(Weather, "weather") };
  const typed = await client.responses.parse({ ...body, max_output_tokens: ENOUGH, text: format });
  check(Weather.parse(typed.output_parsed), "parsed");
  const input = [{ role: "user", content: QUESTION }, ...typed.output, { role: "user", content: "And then?" }];
  check((await client.responses.create({ ...body, input })).output_text, "sent back as parsed");
}

async function errors() {
  const error = await refusal(() => client.chat.completions.create({ ...asked, temperature: -1 }));
  check(error.status === 400 && error.param === "temperature" && error.code === "decimal_below_min_value", error.code);
}

async function too_long() {
  const messages = [{ role: "user", content: TOO_LONG }];
  const error = await refusal(() => client.chat.completions.create({ ...asked, messages }));
  check(error.code === "context_length_exceeded", error.code);
}

async function retries() {
  const patient = new OpenAI({ baseURL: BUSY, apiKey: KEY, maxRetries: 20 });
  const long = { ...asked, max_completion_tokens: 100, ignore_eos: true };
  const replies = await Promise.all([1, 2, 3, 4].map(() => patient.chat.completions.create(long)));
  check(new Set(replies.map((reply) => reply.choices[0].message.content)).size === 1, "all are answered alike");
}

await run("openai (Node)", ["openai"], { chat, stream, abort, tools, structured, responses, errors, too_long, retries });
