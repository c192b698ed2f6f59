"""CUDA source of the experts' folded FP8 products, beside what `expert_source.py` has.

Of a folded weight all groups of a row have one scale: the group's own is in its codes, which
become E4M3. A table of the eight magnitudes at the group's scale is two words, and a byte
permutation looks four of them up. The tensor core's own accumulator keeps some 14 bits, so it gets
128 inputs at a time, which are then added to float32 sums.
"""

FOLDED_SOURCE = r"""
template <int kStages, int kTile, int kBlocks>
struct FoldedMultiplier : Worker<kStages> {
  const unsigned char *row_scales, *token_scales;

  __device__ __forceinline__ FoldedMultiplier(
      Barrier* ready, Barrier* free, const void* codes, const void* lifts, const void* tokens,
      void* out, int n, const unsigned char* row_scales, const unsigned char* token_scales)
      : Worker<kStages>(ready, free, codes, lifts, tokens, out, n), row_scales(row_scales),
        token_scales(token_scales) {}

  // The operand of a block: four groups of 32 inputs.
  static __device__ __forceinline__ void decode(const unsigned (&words)[2][4],
                                                const unsigned (&lifts)[2], unsigned (&a)[4][4]) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      #pragma unroll
      for (int g = 0; g < 4; ++g) {
        const unsigned w = words[half][g], lift = lifts[half] >> (8 * g) & 0xFFu;
        const unsigned low = lift * 0x08080800u + 0x14100800u;   // 0, .5, 1, 1.5 times 2^(lift - 5)
        const unsigned high = lift * 0x08080808u + 0x24201C18u;  // 2, 3, 4, 6
        const unsigned which = w & 0x77777777u;
        a[g][half] = __byte_perm(low, high, which) | (w & 0x80808080u);
        a[g][2 + half] = __byte_perm(low, high, which >> 16) | ((w << 4) & 0x80808080u);
      }
    }
  }

  // Multiply with kTokens tokens from `first` on, and add to their sums.
  template <int kTokens>
  __device__ __forceinline__ void product(unsigned (&a)[4][4], int first, float* sums) {
    float part[kTokens / 2];
    const uint64_t b = this->tokens + ((this->at.stage * kTile + first) * 128 >> 4);
    tl::warpgroup_fence_operand(part, kTokens / 2);
    tl::warpgroup_arrive();
    #pragma unroll
    for (int step = 0; step < 4; ++step)
      tl::wgmma_rs<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32,
                   64, kTokens, 32, false, false, 1, 1>(
          a[step], b + step * 2, reinterpret_cast<uint32_t*>(part), step > 0);
    tl::warpgroup_commit_batch();
    tl::warpgroup_wait<0>();
    tl::warpgroup_fence_operand(part, kTokens / 2);
    #pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] += part[i];
  }

  static __device__ __forceinline__ float power(unsigned char scale) {
    return __uint_as_float(unsigned(scale) << 23);
  }

  template <int kTokens>
  __device__ __forceinline__ void tile(const Item& item) {
    constexpr int kParts = kTokens <= 64 ? 1 : kTokens <= 96 ? 2 : 4;  // as registers allow
    constexpr int kPart = kTokens / kParts;
    float sums[kTokens / 2] = {};
    #pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      unsigned words[2][4], lifts[2], a[4][4];
      this->load(words, lifts);
      decode(words, lifts, a);
      tl::warpgroup_fence_operand(reinterpret_cast<uint32_t*>(&a[0][0]), 16);
      #pragma unroll
      for (int p = 0; p < kParts; ++p) product<kPart>(a, p * kPart, sums + p * (kPart / 2));
      this->release();
    }
    const int lane = threadIdx.x & 31;
    const long row = long(item.expert) * this->n + min(item.band * kBand + this->row, this->n - 3);
    const float by_row[2] = {power(row_scales[row]), power(row_scales[row + 2])};
    int columns;
    __nv_bfloat16* to = this->place(item, columns);
    #pragma unroll
    for (int j = 0; j < kTokens / 8; ++j, to += 8 * this->n) {
      float sum[4];
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = min(8 * j + (lane & 3) * 2 + i, item.rows - 1);
        const float by_token = power(token_scales[item.start + token]);
        #pragma unroll
        for (int half = 0; half < 2; ++half)
          sum[2 * half + i] = sums[4 * j + 2 * half + i] * by_token * by_row[half];
      }
      const uint2 four = {transposed(sum[0], sum[1]), transposed(sum[2], sum[3])};
      if (8 * j + (lane >> 2) < item.rows && columns > 0) *reinterpret_cast<uint2*>(to) = four;
    }
  }
};
"""
