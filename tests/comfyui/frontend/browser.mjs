// A headless Chromium with ComfyUI's front end open in it. Reaches nothing but the server.
import fs from 'node:fs';
import { createRequire } from 'node:module';
import os from 'node:os';
import path from 'node:path';

// PLAYWRIGHT_CORE names the package's folder; else it is found like any module, through NODE_PATH too.
const { chromium } = createRequire(import.meta.url)(process.env.PLAYWRIGHT_CORE || 'playwright-core');

export async function withFrontEnd(server, work, { width = 1800, height = 1000, settings = {} } = {}) {
  const profile = fs.mkdtempSync(path.join(os.tmpdir(), 'frontend-'));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
    headless: true,
    viewport: { width, height },
    args: ['--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  try {
    const page = context.pages()[0] ?? (await context.newPage());
    const pageErrors = [];
    page.on('pageerror', error => pageErrors.push(String(error)));
    const origin = new URL(server).origin;
    await page.route('**/*', route => {
      const url = route.request().url();
      return url.startsWith(origin) || /^(data|blob):/.test(url) ? route.continue() : route.abort();
    });
    await page.goto(server, { waitUntil: 'domcontentloaded' });
    await page.waitForFunction(() => window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 100, null, { timeout: 120_000 });
    await page.waitForTimeout(2500); // a default graph, or the template browser of a first visit, still comes
    for (const [name, value] of Object.entries(settings)) await page.evaluate(([name, value]) => app.extensionManager.setting.set(name, value), [name, value]);
    for (let i = 0; i < 3; i++) {
      await page.keyboard.press('Escape');
      await page.waitForTimeout(300);
    }
    return await work(page, pageErrors);
  } finally {
    await context.close().catch(() => {});
    fs.rmSync(profile, { recursive: true, force: true });
  }
}

// Show the whole graph, groups included.
export async function fit(page) {
  await page.evaluate(() => {
    const boxes = [...app.graph.groups.map(group => [...group.pos, ...group.size]), ...app.graph.nodes.map(node => [node.pos[0], node.pos[1] - 30, node.size[0], node.size[1] + 30])];
    const left = Math.min(...boxes.map(box => box[0])), top = Math.min(...boxes.map(box => box[1]));
    const width = Math.max(...boxes.map(box => box[0] + box[2])) - left, height = Math.max(...boxes.map(box => box[1] + box[3])) - top;
    const { ds, canvas } = app.canvas, view = canvas.getBoundingClientRect();
    ds.scale = Math.min(1, (0.94 * (view.width - 80)) / width, (0.84 * view.height) / height);
    ds.offset[0] = (view.width + 60) / ds.scale / 2 - width / 2 - left;
    ds.offset[1] = (view.height + 20) / ds.scale / 2 - height / 2 - top;
    app.canvas.setDirty(true, true);
  });
  await page.waitForTimeout(800);
}
