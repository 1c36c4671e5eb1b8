// The page's planner in Node: takes the page's folder and a file with messages, and prints their answers as JSON.
import { readFileSync } from "node:fs";

const [folder, messages] = process.argv.slice(2);
const { loadPyodide } = await import(`${folder}/pyodide/pyodide.mjs`);
const bytes = (name) => new Uint8Array(readFileSync(`${folder}/${name}`));
const python = await loadPyodide({ indexURL: `${folder}/pyodide/` });
const site = python.runPython("import sysconfig; sysconfig.get_paths()['purelib']");
for (const name of JSON.parse(readFileSync(`${folder}/files.json`)).wheels) {
  python.unpackArchive(bytes(name), "zip", { extractDir: site });
}
python.FS.writeFile("ask.py", bytes("ask.py"));
const answer = python.runPython("import sys; sys.path.insert(0, '.'); from ask import answer; answer");
const answers = JSON.parse(readFileSync(messages)).map((one) => JSON.parse(answer(JSON.stringify(one))));
process.stdout.write(JSON.stringify(answers));
