// The planner in a thread of its own, so that the page never freezes. It takes messages that answer() of ask.py takes,
// each with a number, and gives its answers back under the same number.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const say = (message) => postMessage(message);

async function bytes(name, part, parts) {
  const reply = await fetch(name);
  if (!reply.ok) throw new Error(`${name}: ${reply.status}`);
  const found = await reply.arrayBuffer();
  say({ loading: part / parts });
  return found;
}

async function start() {
  const files = await (await fetch("files.json")).json();
  const parts = files.wheels.length + 2;
  say({ loading: 0 });
  const python = await loadPyodide({ indexURL: "./pyodide/" });
  say({ loading: 1 / parts });
  const site = python.runPython("import sysconfig; sysconfig.get_paths()['purelib']");
  for (const [place, wheel] of files.wheels.entries()) {
    python.unpackArchive(await bytes(wheel, place + 2, parts), "zip", { extractDir: site });
  }
  python.FS.writeFile("ask.py", new Uint8Array(await bytes("ask.py", parts, parts)));
  return python.runPython("import sys; sys.path.insert(0, '.'); from ask import answer; answer");
}

const ready = start();
ready.then(() => say({ ready: true }), (error) => say({ failed: String(error) }));

onmessage = async ({ data: { number, asked } }) => {
  const answer = await ready;
  let last = 0;
  const told = (done, total) => {
    if (Date.now() - last < 500) return;
    last = Date.now();
    say({ number, done, total });
  };
  try {
    say({ number, found: JSON.parse(answer(JSON.stringify(asked), told)) });
  } catch (error) {
    say({ number, found: { refused: `internal error: ${String(error).trim().split("\n").pop()}`, field: "" } });
  }
};
