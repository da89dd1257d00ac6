// Where each byte of a weight lies in the packed layout, which every level shares.
//
// Rows of a matrix (outputs) lie in the lanes: a vector is 16 rows, a panel up to four vectors. In
// a panel k runs outermost and is cut into lines of 16 rows by a few k:
//   bf16        2 k:  [row][k], 4 bytes a row
//   fp32, fp16  1 k
//   w8a8        4 k:  [row][k], code + 128
//   w4a8        8 k:  [row][byte], byte j holds k = j in its low and k = j + 4 in its high half
//   fp8         4 k:  [row / 4][k / 2][row % 4][k % 2], so that interleaving the bytes of two
//   look-up
//                     results gives pairs of k for 16 rows
// One k of all the panel's vectors, then the next: a panel is read from its first to its last byte.
// Scales of rows stand at its head, those of a group (then its zeros) before the group's lines. The
// last panel has as many vectors as it needs; rows and k past the end are 0. The rows of a paired
// matrix (gate rows, then up rows) share panels: half of a panel's vectors are gate rows, the other
// half the up rows that belong to them.
#pragma once

#include "types.h"

namespace moestro {

constexpr int64_t kVectorRows = 16;
constexpr int64_t kPanelVectors = 4;
constexpr int64_t kPanelRows = kVectorRows * kPanelVectors;
constexpr int64_t kBlockK = 512;  // k summed in one accumulator where groups don't say

struct PackedLayout {
    int64_t rows, in_features;
    int32_t format;
    int32_t group_size;
    bool has_zeros, fp32_scales, paired;
    int64_t line_k, line_bytes;  // of one vector
    int64_t lines;               // along K
    int64_t block_lines;         // lines that share an accumulator
    int64_t vectors, panels;

    explicit PackedLayout(const PackedWeight& w)
        : rows(w.num_rows),
          in_features(w.in_features),
          format(w.format),
          group_size(w.group_size),
          has_zeros((w.flags & kHasZeros) != 0),
          fp32_scales((w.flags & kFp32Scales) != 0),
          paired((w.flags & kPaired) != 0) {
        line_k = format == kW4A8                     ? 8
                 : format == kW8A8 || format == kFP8 ? 4
                 : format == kBF16                   ? 2
                                                     : 1;
        line_bytes = format == kF16 ? 32 : 64;
        lines = ceiling(in_features, line_k);
        block_lines = format == kW8A8 ? lines : (group_size > 0 ? group_size : kBlockK) / line_k;
        vectors = paired ? 2 * ceiling(rows / 2, kVectorRows) : ceiling(rows, kVectorRows);
        panels = ceiling(vectors, kPanelVectors);
    }

    static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }
    static int64_t whole_lines(int64_t bytes) { return ceiling(bytes, 64) * 64; }

    bool row_scales() const { return format == kW8A8 || (format == kFP8 && group_size == 0); }
    bool group_scales() const { return format == kW4A8 || (format == kFP8 && group_size > 0); }
    int64_t blocks() const { return ceiling(lines, block_lines); }
    int64_t groups() const { return group_scales() ? blocks() : row_scales() ? 1 : 0; }
    int64_t scale_bytes() const { return format == kW4A8 && !fp32_scales ? 2 : 4; }

    // Vectors of a panel.
    int64_t width(int64_t panel) const {
        const int64_t left = vectors - panel * kPanelVectors;
        return left < kPanelVectors ? left : kPanelVectors;
    }
    int64_t head_bytes(int64_t width) const { return row_scales() ? 64 * width : 0; }
    int64_t zeros_at(int64_t width) const {
        return whole_lines(kVectorRows * scale_bytes() * width);
    }
    // What stands before a block's lines.
    int64_t block_head_bytes(int64_t width) const {
        if (!group_scales()) return 0;
        return zeros_at(width) + (has_zeros ? whole_lines(kVectorRows * width) : 0);
    }
    // Where a block's head starts.
    int64_t block_at(int64_t block, int64_t width) const {
        return head_bytes(width) +
               block * (block_head_bytes(width) + block_lines * line_bytes * width);
    }
    int64_t panel_bytes(int64_t width) const {
        return whole_lines(head_bytes(width) + blocks() * block_head_bytes(width) +
                           lines * line_bytes * width);
    }
    int64_t panel_at(int64_t panel) const { return panel * panel_bytes(kPanelVectors); }
    int64_t matrix_bytes() const {
        if (panels == 0) return 0;
        return panel_at(panels - 1) + panel_bytes(width(panels - 1));
    }

    // The first row of a panel's vector, and how many it has.
    int64_t first_row(int64_t panel, int64_t vector) const {
        if (!paired) return (panel * kPanelVectors + vector) * kVectorRows;
        const int64_t half = width(panel) / 2, first = panel * (kPanelVectors / 2);
        return vector < half ? (first + vector) * kVectorRows
                             : rows / 2 + (first + vector - half) * kVectorRows;
    }
    int64_t rows_of(int64_t panel, int64_t vector) const {
        const int64_t first = first_row(panel, vector);
        const int64_t end = paired && first < rows / 2 ? rows / 2 : rows;
        return end - first < kVectorRows ? end - first : kVectorRows;
    }
};

}  // namespace moestro
