// The page in Chromium over its debugging protocol: takes the browser, a profile's folder, an address and scripts, and
// prints what each script gave once the page is still, with the console's lines and every address that was asked for.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";

const [program, profile, web, address, ...scripts] = process.argv.slice(2);
const { WebSocket } = createRequire(`${web}/package.json`)("ws");
const browser = spawn(program, ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
  "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0", `--user-data-dir=${profile}`]);
const endpoint = await new Promise((found) => {
  let told = "";
  browser.stderr.on("data", (some) => { told += some; const line = told.match(/ws:\/\/\S+/); if (line) found(line[0]); });
});
const socket = new WebSocket(endpoint);
await new Promise((open) => socket.on("open", open));
let number = 0;
const waiting = new Map(), console_ = [], requests = new Set();
socket.on("message", (text) => {
  const { id, result, error, method, params } = JSON.parse(text);
  if (id) waiting.get(id)(result ?? { error });
  if (method === "Runtime.exceptionThrown") console_.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
  if (method === "Log.entryAdded" && params.entry.level === "error") console_.push(params.entry.text + " " + (params.entry.url ?? ""));
  if (method === "Runtime.consoleAPICalled" && params.type === "error") console_.push(JSON.stringify(params.args));
  if (method === "Network.requestWillBeSent") requests.add(params.request.url);
});
let session;
const call = (method, params = {}) => new Promise((done) => {
  waiting.set(++number, done);
  socket.send(JSON.stringify({ id: number, method, params, sessionId: session }));
});
const { targetId } = await call("Target.createTarget", { url: "about:blank" });
session = (await call("Target.attachToTarget", { targetId, flatten: true })).sessionId;
for (const domain of ["Runtime", "Log", "Network", "Page"]) await call(`${domain}.enable`);
await call("Page.navigate", { url: address });
const evaluate = async (expression) => (await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true })).result?.value;
const still = async () => {
  while (!(await evaluate("document.body?.classList.contains('ready') && !document.body.classList.contains('busy')"))) {
    await new Promise((later) => setTimeout(later, 100));
  }
};
const found = [];
for (const script of scripts) {
  await still();
  found.push(await evaluate(script));
}
await still();
process.stdout.write(JSON.stringify({ found, console: console_, requests: [...requests] }));
await call("Browser.close");
browser.kill();
process.exit(0);
