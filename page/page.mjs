// Loads Python and prepkit from this folder, and shows what page.py answers. What comes back is text, or HTML that
// stands in a frame without scripts.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const at = (id) => document.getElementById(id);

const python = await loadPyodide({ indexURL: "./pyodide/" });
python.unpackArchive(await (await fetch("site.zip")).arrayBuffer(), "zip", { extractDir: "/site" });
python.runPython("import sys; sys.path.insert(0, '/site')");
const page = python.pyimport("page");

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  at("state").textContent = "checking ...";
  setTimeout(() => {
    const asked = { language: at("language").value, config: at("config").value, model: at("model").value };
    for (const name of ["processes", "per_node", "memory"]) asked[name] = at(name).value.trim();
    const answer = JSON.parse(page.answer(JSON.stringify(asked)));
    at("found").textContent = answer.found;
    at("plan").srcdoc = answer.page;
    at("plan").hidden = !answer.page;
    at("state").textContent = answer.wrong ? "something is wrong" : "fine, as far as it can be known here";
  });
});
at("go").disabled = false;
at("state").textContent = "ready";
