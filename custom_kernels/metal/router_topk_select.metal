    // The TOP largest of E logits of each row, best first, with their weights. A threadgroup takes a row. Logits are given,
    // or with PRODUCT what W [E, H] makes of x. They become (logit + bias) * LOGIT_SCALE, and the weights are
    //   NORMALIZE  their softmax over those chosen; otherwise their softmax over all
    //   SIGMOID    their sigmoids instead, divided by the sum of those chosen where NORMALIZE; the choice is by these and
    //              what choice_bias adds
    //   SCALE      times a number;   EXPERT_SCALE  times a number an expert
    // With GROUPS, the choice is among the KEPT best groups of neighbours: those of the best expert, or with SIGMOID of the
    // two best. Each logit counts those that come before it, so that nobody waits for a maximum. Compared are integers,
    // because compilers may take it that there is no NaN: NaN comes last, and of what is equal the lower index comes first.
    threadgroup float values[E];
    threadgroup uint keys[E];
    threadgroup uint group_keys[GROUPS];
    threadgroup float best[TOP];
    threadgroup uint best_expert[TOP];
    threadgroup float sums[MAX_SIMDGROUPS];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup, threads = simds * SIMD_WIDTH, self = simd * SIMD_WIDTH + lane;
    const uint m = threadgroup_position_in_grid.x;
    if (PRODUCT) {
      constexpr uint EIGHTS = H / 8;
      for (uint e = simd; e < E; e += simds) {
        Partial products = empty_partial();
        float rest = 0.0f;
        for (uint eight = lane; eight < EIGHTS; eight += SIMD_WIDTH) {
          Packed<W> learned;
          Packed<T> given;
          load_eight(w + e * H + eight * 8, learned);
          load_eight(x + m * H + eight * 8, given);
          products = add_products(unpack_eight(learned), unpack_eight(given), products);
        }
        for (uint k = EIGHTS * 8 + lane; k < H; k += SIMD_WIDTH) {
          rest += float(w[e * H + k]) * float(x[m * H + k]);
        }
        const float logit = simd_sum(collapse(products) + rest);
        if (lane == 0) {
          values[e] = logit;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint e = self; e < E; e += threads) {
      float value = PRODUCT ? values[e] : float(logits[m * E + e]);
      if (BIAS) {
        value += float(bias[e]);
      }
      value *= as_type<float>(LOGIT_SCALE_BITS);
      if (SIGMOID) {
        value = 1.0f / (1.0f + exp(-value));
      }
      values[e] = value;
      keys[e] = ordered_key(CHOICE_BIAS ? value + float(choice_bias[e]) : value);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (GROUPS > 1) {
      constexpr uint EACH = E / GROUPS;
      for (uint group = self; group < GROUPS; group += threads) {
        uint first = group * EACH, second = first;
        for (uint e = first + 1; e < (group + 1) * EACH; ++e) {
          if (keys[e] > keys[first]) {
            second = first;
            first = e;
          } else if (second == first || keys[e] > keys[second]) {
            second = e;
          }
        }
        float both = values[first] + values[second];
        if (CHOICE_BIAS) {
          both += float(choice_bias[first]) + float(choice_bias[second]);
        }
        group_keys[group] = SIGMOID ? ordered_key(both) : keys[first];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint e = self; e < E; e += threads) {
        const uint group = e / EACH, key = group_keys[group];
        uint before = 0;
        for (uint i = 0; i < GROUPS; ++i) {
          before += group_keys[i] > key || (group_keys[i] == key && i < group) ? 1 : 0;
        }
        if (before >= KEPT) {
          keys[e] = 0;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint e = self; e < E; e += threads) {
      const uint key = keys[e];
      uint before = 0;
      for (uint i = 0; i < E; ++i) {
        before += keys[i] > key || (keys[i] == key && i < e) ? 1 : 0;
      }
      if (before < TOP) {
        best[before] = values[e];
        best_expert[before] = e;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    if (SIGMOID && NORMALIZE) {
      for (uint i = 0; i < TOP; ++i) {
        sum += best[i];
      }
      sum += 1.0e-20f;
    } else if (SIGMOID) {
      sum = 1.0f;
    } else if (NORMALIZE) {
      for (uint i = 0; i < TOP; ++i) {
        sum += exp(best[i] - best[0]);
      }
    } else {
      for (uint e = self; e < E; e += threads) {
        sum += exp(values[e] - best[0]);
      }
      sum = threadgroup_sum(sum, sums, lane, simd, simds);
    }
    for (uint i = self; i < TOP; i += threads) {
      const uint e = best_expert[i];
      float weight = (SIGMOID ? best[i] : exp(best[i] - best[0])) / sum * as_type<float>(SCALE_BITS);
      if (EXPERT_SCALE) {
        weight *= float(expert_scale[e]);
      }
      indices[m * TOP + i] = int(e);
      weights[m * TOP + i] = weight;
    }
