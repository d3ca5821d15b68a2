#!/usr/bin/env node
// node build.mjs SERVER [NAME ...]: writes workflows/NAME.json and workflows/api/NAME.json of the graphs in graphs.mjs, through a running ComfyUI's front end.
import { createHash } from 'node:crypto';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { withFrontEnd } from './browser.mjs';
import { graphs } from './graphs.mjs';

const [server, ...names] = process.argv.slice(2);
const folder = path.join(path.dirname(fileURLToPath(import.meta.url)), '../../../workflows');
fs.mkdirSync(path.join(folder, 'api'), { recursive: true });

const uuid = name => createHash('sha256').update(name).digest('hex').replace(/^(.{8})(.{4}).(.{3}).(.{3})(.{12}).*/, '$1-$2-4$3-8$4-$5');

// In the page: create nodes, widgets, links and groups, and lay them out.
async function assemble({ rows, id }) {
  const WIDTH = 340, TITLE = 30, GAP = 70, PAD = 20, HEAD = 50, FOOT = 60, BETWEEN = 50; // FOOT: the newer node design is a little higher
  app.graph.clear();
  const groups = rows.flat().filter(Boolean), made = new Map();
  for (const group of groups) {
    group.made = group.nodes.map(wanted => {
      const node = LiteGraph.createNode(wanted.type);
      if (!node) throw new Error(`no node ${wanted.type}`);
      app.graph.add(node);
      if (wanted.title) node.title = wanted.title;
      if (wanted.id) made.set(wanted.id, node);
      if (wanted.text) node.widgets[0].value = wanted.text;
      return node;
    });
  }
  for (const wanted of groups.flatMap(group => group.nodes)) {
    const node = wanted.id ? made.get(wanted.id) : groups.flatMap(group => group.made)[groups.flatMap(group => group.nodes).indexOf(wanted)];
    for (const [name, value] of Object.entries(wanted.set ?? {})) {
      const widget = node.widgets.find(widget => widget.name === name);
      if (!widget) throw new Error(`${wanted.type} has no widget ${name}`);
      widget.value = value;
      widget.callback?.(value);
    }
    for (const [name, source] of Object.entries(wanted.from ?? {})) {
      const [origin, output] = source.split('.'), from = made.get(origin);
      const slot = from.outputs.findIndex(one => one.name === output), input = node.inputs.findIndex(one => one.name === name);
      if (slot < 0 || input < 0) throw new Error(`${source} -> ${wanted.type}.${name}: no such ${slot < 0 ? 'output' : 'input'} (${node.inputs.map(one => one.name)})`);
      from.connect(slot, node, input);
      await new Promise(done => setTimeout(done, 100)); // growing inputs grow after a connection
    }
  }
  await new Promise(done => setTimeout(done, 1500));
  const heights = new Map();
  for (const group of groups)
    group.made.forEach((node, i) => {
      const [width, height] = group.nodes[i].size ?? [WIDTH, 0];
      heights.set(node, Math.ceil(Math.max(node.computeSize()[1], height) / 10) * 10);
      node.setSize([width, heights.get(node)]);
    });
  const groupHeight = group => HEAD + group.made.reduce((sum, node) => sum + heights.get(node) + GAP, 0) - GAP + FOOT + TITLE;
  const groupWidth = group => Math.max(...group.made.map(node => node.size[0])) + 2 * PAD;
  const columns = Math.max(...rows.map(row => row.length));
  const widths = [...Array(columns).keys()].map(i => Math.max(...rows.map(row => (row[i] ? groupWidth(row[i]) : 0))));
  let top = 0;
  for (const row of rows) {
    let left = 0;
    row.forEach((group, i) => {
      if (group) {
        const box = new LiteGraph.LGraphGroup(group.title);
        box.pos = [left, top];
        box.size = [widths[i], groupHeight(group)];
        box.color = group.color;
        app.graph.add(box);
        let y = top + HEAD + TITLE;
        for (const node of group.made) {
          node.pos = [left + PAD, y];
          node.setSize([widths[i] - 2 * PAD, heights.get(node)]);
          y += heights.get(node) + GAP;
        }
      }
      left += widths[i] + BETWEEN;
    });
    top += Math.max(...row.map((group, i) => (group && !(i === 0 && rows.length > 1) ? groupHeight(group) : 0))) + BETWEEN;
  }
  await new Promise(done => setTimeout(done, 500));
  const ui = app.graph.serialize(), api = (await app.graphToPrompt()).output;
  ui.id = id;
  delete ui.extra;
  return { ui, api };
}

for (const name of names.length ? names : Object.keys(graphs)) {
  // A fresh page each: the front end remembers previews by node number.
  const { ui, api } = await withFrontEnd(server, page => page.evaluate(assemble, { rows: graphs[name], id: uuid(name) }), { settings: { 'Comfy.VueNodes.Enabled': false } });
  fs.writeFileSync(path.join(folder, `${name}.json`), JSON.stringify(ui, null, 2) + '\n');
  fs.writeFileSync(path.join(folder, 'api', `${name}.json`), JSON.stringify(api, null, 2) + '\n');
  console.log(`${name}: ${ui.nodes.length} nodes, ${Object.keys(api).length} in the prompt`);
}
