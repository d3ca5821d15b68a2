#!/usr/bin/env node
// node open.mjs SERVER [--run NAME] [--pictures FOLDER] [--settings JSON] WORKFLOW.json ...: opens workflows in ComfyUI's front end, runs those
// whose file name is NAME, and prints a JSON list of what the front end said about each. --pictures: where to put a screenshot of each.
import fs from 'node:fs';
import path from 'node:path';
import { parseArgs } from 'node:util';
import { fit, withFrontEnd } from './browser.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { run: { type: 'string' }, pictures: { type: 'string' }, settings: { type: 'string', default: '{}' }, size: { type: 'string', default: '1800x1000' } },
});
const [server, ...files] = positionals;
const [width, height] = values.size.split('x').map(Number);

const load = async workflow => {
  const known = new Set([...Object.keys(LiteGraph.registered_node_types), 'Note', 'MarkdownNote', 'Reroute']);
  await app.loadGraphData(workflow);
  await new Promise(done => setTimeout(done, 1500));
  const { output } = await app.graphToPrompt();
  return {
    missing: [...new Set(workflow.nodes.map(node => node.type).filter(type => !known.has(type)))],
    red: app.graph.nodes.filter(node => node.has_errors).map(node => node.title),
    prompt: Object.fromEntries(Object.entries(output).map(([id, node]) => [id, { class_type: node.class_type, inputs: node.inputs }])),
  };
};

const complaints = () => {
  const shown = [...document.querySelectorAll('[data-testid*="error-overlay"], [role="dialog"], .p-dialog, .p-toast-message-error, .p-toast-message-warn')];
  return [...new Set(shown.filter(element => element.getClientRects().length).map(element => element.innerText.trim()).filter(Boolean))];
};

async function run(page) {
  const before = await page.evaluate(async () => Object.keys(await (await fetch('/api/history')).json()));
  await page.evaluate(() => app.queuePrompt(0));
  for (const end = Date.now() + 300_000; Date.now() < end; await page.waitForTimeout(500)) {
    const entry = await page.evaluate(async before => Object.entries(await (await fetch('/api/history')).json()).find(([id]) => !before.includes(id))?.[1], before);
    if (entry) return { status: entry.status.status_str, pictures: Object.values(entry.outputs).flatMap(output => output.images ?? []).length };
    const errors = await page.evaluate(() => app.lastNodeErrors);
    if (errors && Object.keys(errors).length) return { status: 'refused', errors };
  }
  return { status: 'timed out' };
}

const reports = await withFrontEnd(server, async (page, pageErrors) => {
  const reports = [];
  for (const file of files) {
    const name = path.basename(file, '.json'), report = { name, ...(await page.evaluate(load, JSON.parse(fs.readFileSync(file, 'utf8')))) };
    if (values.run === name || values.run === 'all') report.run = await run(page);
    await fit(page);
    report.complaints = await page.evaluate(complaints);
    report.pageErrors = pageErrors.splice(0);
    if (values.pictures) await page.screenshot({ path: path.join(values.pictures, `${name}.png`) });
    reports.push(report);
  }
  return reports;
}, { width, height, settings: JSON.parse(values.settings) });
console.log(JSON.stringify(reports, null, 1));
