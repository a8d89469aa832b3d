// What every stack for Node is put through: flows by name, each told as one line of JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

export const [BASE, BUSY, MODEL] = process.argv.slice(2);
export const KEY = "none";
export const QUESTION = "What is the weather?";
export const ENOUGH = 300;
export const TOO_LONG = "wheel ".repeat(9000);
process.env.AI_SDK_LOG_WARNINGS = "false";

export function check(holds, said) {
  if (!holds) throw new Error(`does not hold: ${said}`);
}

export async function refusal(asked) {
  try {
    await asked();
  } catch (error) {
    return error;
  }
  throw new Error("not refused");
}

function version(name) {
  const modules = join(dirname(createRequire(import.meta.url).resolve("zod/package.json")), "..");
  return JSON.parse(readFileSync(join(modules, name, "package.json"))).version;
}

export async function run(stack, packages, flows) {
  const versions = Object.fromEntries(packages.map((name) => [name, version(name)]));
  console.log(JSON.stringify({ stack, versions }));
  for (const [flow, work] of Object.entries(flows)) {
    let problem = "";
    try {
      await work();
    } catch (error) {
      problem = `${error?.stack ?? error} ${error?.responseBody ?? ""}`;
    }
    console.log(JSON.stringify({ flow, problem }));
  }
}
