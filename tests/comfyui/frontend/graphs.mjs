// The example graphs, in one place: what is in them and how they are grouped. build.mjs turns them into workflows/*.json and workflows/api/*.json.

export const CHECKPOINT = 'tiny'; // what the loader shows when a graph is opened: its first entry

const BLUE = '#3f789e', GREEN = '#8A8', VIOLET = '#88A', OCHRE = '#b58b2a';

const files = fullSize => `
### Files
Nothing is needed to try it: **${CHECKPOINT}** is in the pack. It paints simple coloured shapes, 256 pixels wide.

The full model, as single files (safetensors, quantised or not, or GGUF) or as a folder in the diffusers layout:

\`\`\`
ComfyUI/models/
    diffusion_models/   the denoiser
    text_encoders/      Qwen3-VL 8B
    vae/                its VAE
    diffusers/          or a folder with model_index.json
\`\`\`

Then press **R**, choose it in the loader${fullSize}

**Its licence, the Qwen Research License, is non-commercial.**`;

const note = (text, fullSize) => {
  const all = text.trim() + '\n' + files(fullSize);
  const lines = all.split('\n').reduce((sum, line) => sum + Math.max(0.7, Math.ceil(line.length / 68)), 0);
  return { type: 'MarkdownNote', title: 'Read me', size: [440, 60 + 18 * lines], text: all };
};
const sized = ' and set width and height to 1024 x 1024 (natively up to 2048 x 2048, multiples of 32).';
const unsized = '. It edits at an area of 1024 x 1024 unless you say otherwise.';

const loader = { id: 'loader', type: 'Qwen21Loader', set: { checkpoint: CHECKPOINT } };
const encode = (id, prompt, from = {}, set = {}) => ({ id, type: 'Qwen21Encode', size: [400, 400], set: { prompt, ...set }, from: { clip: 'loader.CLIP', ...from } });
// A picture to begin with that the tiny model understands.
const painted = (id, prompt, seed = 7) => [
  { ...encode(`${id}_encode`, prompt), size: [400, 330] },
  { ...sampler(`${id}_sampler`, `${id}_encode`, 'canvas.LATENT', { seed }), size: [320, 400] },
  decode(id, `${id}_sampler.latent`),
];
const empty = (id, set = {}) => ({ id, type: 'EmptyLatentImage', title: 'Canvas', set: { width: 256, height: 256, batch_size: 1, ...set } });
const references = (id, encoder) => ({ id, type: 'Qwen21ReferenceLatents', from: { positive: `${encoder}.positive`, negative: `${encoder}.negative`, vae: 'loader.VAE' } });
const sampler = (id, conditioning, latent, set = {}) => ({
  id, type: 'Qwen21Sampler', size: [320, 500], set: { seed: 7, ...set }, // room for the preview under its widgets
  from: { model: 'loader.MODEL', positive: `${conditioning}.positive`, negative: `${conditioning}.negative`, latent },
});
const decode = (id, latent) => ({ id, type: 'Qwen21Decode', from: { vae: 'loader.VAE', latent } });
const save = (images, prefix, title = 'Save') => ({ type: 'SaveImage', title, size: [400, 440], set: { filename_prefix: `qwen-image-21/${prefix}` }, from: { images } });
const group = (title, color, ...nodes) => ({ title, color, nodes });

// Every graph is a list of rows; a row is a list of groups (or null), left to right.
export const graphs = {
  text_to_image: [[
    group('Read me', BLUE, note(`
## Text to image
Write what you want to see and press **Run**.

- **steps** 0 is the checkpoint's own number: 40, or the 8 of Turbo.
- **cfg** 1 is what the model is meant for. The negative prompt counts only above 1, and costs a second pass.`, sized)),
    group('Model', BLUE, loader),
    group('Prompt and canvas', GREEN, encode('encode', 'a large red star in the center on a plain blue background'), empty('canvas')),
    group('Paint', VIOLET, sampler('sampler', 'encode', 'canvas.LATENT'), decode('decode', 'sampler.latent')),
    group('Result', OCHRE, save('decode.image', 'text_to_image')),
  ]],

  edit_one_picture: [[
    group('Read me', BLUE, note(`
## Edit one picture
A picture is painted, then changed. For one of your own add **Load Image** (double-click the canvas), connect it to *image_1*, say what to change and press **Run**. The result has its proportions.

- **size_policy** auto keeps clear of 1024 x 1024, where the model may hand back a near-copy. *keep* edits the picture's own pixels without resampling.
- Only the prompt changed? The picture is not encoded by the VAE again.`, unsized)),
    group('Model', BLUE, loader, empty('canvas')),
    group('A picture to edit', BLUE, ...painted('picture', 'a large red star in the center on a plain blue background')),
    group('What to change', GREEN, encode('encode', 'change the background to a yellow to green vertical gradient background', { 'images.image_1': 'picture.image' }), references('references', 'encode')),
    group('Paint', VIOLET, sampler('sampler', 'references', 'references.latent'), decode('decode', 'sampler.latent')),
    group('Result', OCHRE, save('decode.image', 'edit')),
  ]],

  combine_three_pictures: [
    [
      group('Read me', BLUE, note(`
## Combine three pictures
Three pictures are painted, then put together; for your own add three **Load Image** (double-click the canvas) and connect them in their place. In the prompt they are **&lt;image1&gt;**, **&lt;image2&gt;** and **&lt;image3&gt;**, by the input they are connected to.

- Up to ten pictures: a new input appears as you connect the last.
- **canvas** says whose size the result gets: the last picture's, the first's, or your own.`, unsized)),
      group('<image1>', BLUE, ...painted('picture_1', 'a large pink square in the center on a plain white background')),
      group('<image2>', BLUE, ...painted('picture_2', 'a large yellow triangle on the left on a plain black background', 8)),
      group('<image3>', BLUE, ...painted('picture_3', 'a small green ring in the top right on a cyan to purple vertical gradient background', 9)),
    ],
    [
      group('Model', BLUE, loader, empty('canvas')),
      group('What to make of them', GREEN,
        encode('encode', 'put the pink square of <image1> and the yellow triangle of <image2> on the background of <image3>',
          Object.fromEntries([1, 2, 3].map(i => [`images.image_${i}`, `picture_${i}.image`]))),
        references('references', 'encode')),
      group('Paint', VIOLET, sampler('sampler', 'references', 'references.latent'), decode('decode', 'sampler.latent')),
      group('Result', OCHRE, save('decode.image', 'combine')),
    ],
  ],

  transparent_sticker: [
    [
      group('Read me', BLUE, note(`
## Transparent stickers
Above: a sticker from words. Below: that sticker in, another sticker out.

- Transparency is asked for in words. Keep the first and the last sentence of the prompts, write in between.
- A sticker of your own: add **Load Image**, which splits it into RGB and MASK, and **Join Image with Alpha**, which makes four channels of them again, so that the model sees what is transparent. Connect that to *image_1*.
- The PNG has alpha because **rgba** is saved, not *image*.
- **alpha** snap removes the haze of nearly clear pixels and the fringes.`, ': the canvas above then wants 1024 x 1024.')),
      group('Model', BLUE, loader),
      group('A sticker from words', GREEN,
        encode('encode', 'This is an RGBA image with transparency. A large red heart in the center. The image has alpha channel and the background is transparent.'), empty('canvas')),
      group('Paint', VIOLET, sampler('sampler', 'encode', 'canvas.LATENT'), decode('decode', 'sampler.latent')),
      group('Sticker', OCHRE, save('decode.rgba', 'sticker', 'Save with transparency')),
    ],
    [
      null,
      group('What to make of it', GREEN, encode('encode_edit', 'add a small blue star in the top right', { 'images.image_1': 'decode.rgba' }), references('references', 'encode_edit')),
      group('Paint', VIOLET, sampler('sampler_edit', 'references', 'references.latent'), decode('decode_edit', 'sampler_edit.latent')),
      group('Changed sticker', OCHRE, save('decode_edit.rgba', 'sticker_edit', 'Save with transparency')),
    ],
  ],

  masked_edit: [[
    group('Read me', BLUE, note(`
## Edit inside a mask
Only the masked rectangle is replaced; every pixel outside it stays as it was, to the bit.

- **size_policy** keep: the reference's own pixels, so the result lies exactly on the picture. Up to 4.5 megapixels.
- After decoding, **Image Composite Masked** puts the new pixels on the original through the mask.
- A mask of your own: right-click the picture, *Open in MaskEditor*, then connect the picture's MASK to the composite in place of the rectangle's. Do not blur it if the rest must stay exact.
- A picture of your own: add **Load Image** (double-click the canvas) and connect it to *image_1*, **Get Image Size** and the composite.`, '. Pictures near a megapixel suit it best.')),
    group('Model', BLUE, loader, empty('canvas')),
    group('A picture to edit', BLUE, ...painted('picture', 'a large red star in the center on a plain blue background')),
    group('What to change', GREEN, encode('encode', 'change the background to a plain yellow background', { 'images.image_1': 'picture.image' }, { size_policy: 'keep' }), references('references', 'encode')),
    group('Paint', VIOLET, sampler('sampler', 'references', 'references.latent'), decode('decode', 'sampler.latent')),
    group('Mask: a rectangle', BLUE,
      { id: 'size', type: 'GetImageSize', from: { image: 'picture.image' } },
      { id: 'blank', type: 'SolidMask', title: 'Nothing masked', set: { value: 0 }, from: { width: 'size.width', height: 'size.height' } },
      { id: 'box', type: 'SolidMask', title: 'Rectangle: its size', set: { value: 1, width: 256, height: 110 } },
      { id: 'mask', type: 'MaskComposite', title: 'Rectangle: its place', set: { x: 0, y: 0, operation: 'add' }, from: { destination: 'blank.MASK', source: 'box.MASK' } }),
    group('Result', OCHRE,
      { id: 'composite', type: 'ImageCompositeMasked', title: 'New pixels inside, old ones outside', set: { x: 0, y: 0, resize_source: false },
        from: { destination: 'picture.image', source: 'decode.image', mask: 'mask.MASK' } },
      save('composite.IMAGE', 'masked_edit')),
  ]],

  text_to_image_ksampler: [[
    group('Read me', BLUE, note(`
## Text to image with KSampler
The same picture by ComfyUI's own sampler. **Schedule** gives the model the shift of this canvas; without it every size would be painted with the same one.

- KSampler's *simple* scheduler still lacks the last stretch of the model's own schedule. For that, connect **sigmas** to *SamplerCustomAdvanced*, or use the Qwen-Image 2.1 Sampler.
- Turbo checkpoints need their own 8 sigmas: do not sample them here.`, sized)),
    group('Model', BLUE, loader),
    group('Prompt and canvas', GREEN, encode('encode', 'a large red star in the center on a plain blue background'), empty('canvas')),
    group('Paint', VIOLET,
      { id: 'schedule', type: 'Qwen21Schedule', from: { model: 'loader.MODEL', latent: 'canvas.LATENT' } },
      { id: 'sampler', type: 'KSampler', size: [320, 460], set: { seed: 7, steps: 40, cfg: 1, sampler_name: 'euler', scheduler: 'simple', denoise: 1 },
        from: { model: 'schedule.model', positive: 'encode.positive', negative: 'encode.negative', latent_image: 'canvas.LATENT' } },
      decode('decode', 'sampler.LATENT')),
    group('Result', OCHRE, save('decode.image', 'ksampler')),
  ]],

  batch_of_four: [[
    group('Read me', BLUE, note(`
## Four pictures of one prompt
**batch_size** is 4: the prompt is computed once, then four pictures are painted against it. The report shows what that cost.

- The same seed gives the same four. To paint the third one alone, put *Latent From Batch* behind the canvas.
- Editing works the same way: *Reference Latents* has a batch_size.`, sized)),
    group('Model', BLUE, loader),
    group('Prompt and canvas', GREEN, encode('encode', 'a large green star on a plain orange background'), empty('canvas', { batch_size: 4 })),
    group('Paint', VIOLET, sampler('sampler', 'encode', 'canvas.LATENT'), decode('decode', 'sampler.latent')),
    group('Result', OCHRE, { ...save('decode.image', 'batch'), size: [400, 440] }, { type: 'PreviewAny', title: 'Report', size: [400, 160], from: { source: 'sampler.report' } }),
  ]],
};
