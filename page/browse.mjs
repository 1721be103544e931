// node browse.mjs NODE_MODULES URL: fills in the page in a real browser, and prints as JSON what it then shows.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [modules, url] = process.argv.slice(2);
const from = createRequire(`${modules}/`);
const load = async (name) => (await import(pathToFileURL(from.resolve(name)))).default;
const [chromium, puppeteer] = [await load("@sparticuz/chromium"), await load("puppeteer-core")];

const browser = await puppeteer.launch({
  args: chromium.args, executablePath: await chromium.executablePath(), headless: "shell",
});
const tab = await browser.newPage();
const asked = [], errors = [];
tab.on("request", (request) => asked.push(request.url()));
tab.on("pageerror", (error) => errors.push(String(error)));
await tab.goto(url);
await tab.waitForSelector("#go:enabled", { timeout: 240000 });

const answers = [];
const config = await tab.$eval("#config", (box) => box.value);
const mended = config.replace("mixed_precison", "mixed_precision");
const hostile = `${mended}"<img src=x onerror=window.hacked=1><script>window.hacked=1</script>": 1\n`;
for (const text of [config, mended, hostile]) {
  await tab.$eval("#config", (box, value) => { box.value = value; }, text);
  await tab.click("#go");
  await tab.waitForFunction(() => /fine|wrong/.test(document.getElementById("state").textContent), { timeout: 240000 });
  answers.push(await tab.evaluate(() => {
    const [state, found, plan] = ["state", "found", "plan"].map((id) => document.getElementById(id));
    const told = { state: state.textContent, found: found.textContent, page: plan.hidden ? "" : plan.srcdoc };
    state.textContent = "";
    return { ...told, hacked: Boolean(window.hacked) };
  }));
}
console.log(JSON.stringify({ answers, asked, errors, browser: await browser.version() }));
await browser.close();
