// Packing weights, and unpacking them: plain loops at the speed of memory.
#include "packing.h"

#include <cstring>

#include "packed.h"
#include "thread_pool.h"

namespace moestro {
namespace {

struct Place {
    int64_t panel, vector, lane;
};

Place place_of(const PackedLayout& layout, int64_t row) {
    if (!layout.paired) {
        const int64_t vector = row / kVectorRows;
        return {vector / kPanelVectors, vector % kPanelVectors, row % kVectorRows};
    }
    const int64_t inner = layout.rows / 2, second = row >= inner ? 1 : 0;
    const int64_t at = row - second * inner, vector = at / kVectorRows;
    const int64_t panel = vector / (kPanelVectors / 2);
    return {panel, vector % 2 + second * (layout.width(panel) / 2), at % kVectorRows};
}

// A row in the rows layout.
struct Row {
    uint8_t* codes;
    float* scales;
    uint8_t* zeros;
};

int64_t row_code_bytes(const PackedLayout& l) {
    switch (l.format) {
        case kF32:
            return 4 * l.in_features;
        case kBF16:
        case kF16:
            return 2 * l.in_features;
        case kW4A8:
            return l.in_features / 2;
        default:
            return l.in_features;
    }
}

// Eight codes k = 0..7, two a byte, to the order of a line, and back.
uint32_t spread(uint32_t half) {
    half = (half | half << 8) & 0x00ff00ffu;
    return (half | half << 4) & 0x0f0f0f0fu;
}
uint32_t gather(uint32_t spaced) {
    spaced = (spaced | spaced >> 4) & 0x00ff00ffu;
    return (spaced | spaced >> 8) & 0xffffu;
}
uint32_t line_order(uint32_t codes) { return spread(codes & 0xffffu) | spread(codes >> 16) << 4; }
uint32_t row_order(uint32_t line) {
    return gather(line & 0x0f0f0f0fu) | gather(line >> 4 & 0x0f0f0f0fu) << 16;
}

// Moves one lane's part of a line: `n` bytes that count at `code`, the rest of the lane 0.
template <int32_t format, bool to_packed>
void move_lane(uint8_t* line, int64_t lane, uint8_t* code, int64_t n) {
    constexpr int64_t kBytes = format == kF16 ? 2 : 4;
    if constexpr (format == kFP8) {
        uint8_t* first = line + lane / 4 * 16 + lane % 4 * 2;
        for (int64_t k = 0; k < 4; ++k) {
            uint8_t* at = first + k / 2 * 8 + k % 2;
            if (to_packed)
                *at = k < n ? code[k] : 0;
            else if (k < n)
                code[k] = *at;
        }
        return;
    }
    uint8_t* at = line + lane * kBytes;
    uint32_t word = 0;
    if constexpr (to_packed) {
        if (n == kBytes)
            std::memcpy(&word, code, kBytes);
        else
            std::memcpy(&word, code, static_cast<size_t>(n));
        if (format == kW8A8) word ^= 0x80808080u;
        if (format == kW4A8) word = line_order(word);
        std::memcpy(at, &word, kBytes);
    } else {
        std::memcpy(&word, at, kBytes);
        if (format == kW8A8) word ^= 0x80808080u;
        if (format == kW4A8) word = row_order(word);
        std::memcpy(code, &word, static_cast<size_t>(n));
    }
}

template <bool to_packed>
void move_scale(const PackedLayout& l, uint8_t* head, int64_t vector, int64_t lane, int64_t width,
                const Row& row, int64_t group) {
    const int64_t at = vector * kVectorRows + lane;
    float scale = 0.0f;
    uint32_t bits = 0;
    if (to_packed) {
        if (row.scales != nullptr) scale = row.scales[group];
        std::memcpy(&bits, &scale, 4);
        if (l.scale_bytes() == 2) bits >>= 16;
        std::memcpy(head + at * l.scale_bytes(), &bits, static_cast<size_t>(l.scale_bytes()));
    } else {
        std::memcpy(&bits, head + at * l.scale_bytes(), static_cast<size_t>(l.scale_bytes()));
        if (l.scale_bytes() == 2) bits <<= 16;
        std::memcpy(row.scales + group, &bits, 4);
    }
    if (!l.has_zeros) return;
    uint8_t* zero = head + l.zeros_at(width) + at;
    if (to_packed)
        *zero = row.zeros == nullptr ? 0 : row.zeros[group];
    else
        row.zeros[group] = *zero;
}

// Lanes [begin, end) of one vector; row(lane) has null codes for a row past the matrix's end.
template <int32_t format, bool to_packed, class RowOf>
void move_lanes(const PackedLayout& l, uint8_t* panel, int64_t width, int64_t vector, int64_t begin,
                int64_t end, RowOf&& row) {
    const int64_t code_bytes = row_code_bytes(l), lane_bytes = l.line_bytes / kVectorRows;
    if (l.row_scales())
        for (int64_t lane = begin; lane < end; ++lane)
            move_scale<to_packed>(l, panel, vector, lane, width, row(lane), 0);
    for (int64_t block = 0; block < l.blocks(); ++block) {
        uint8_t* head = panel + l.block_at(block, width);
        if (l.group_scales())
            for (int64_t lane = begin; lane < end; ++lane)
                move_scale<to_packed>(l, head, vector, lane, width, row(lane), block);
        uint8_t* line = head + l.block_head_bytes(width) + vector * l.line_bytes;
        const int64_t first = block * l.block_lines;
        const int64_t last = first + l.block_lines < l.lines ? first + l.block_lines : l.lines;
        for (int64_t i = first; i < last; ++i, line += width * l.line_bytes) {
            const int64_t at = i * lane_bytes, left = code_bytes - at;
            const int64_t n = left < lane_bytes ? left : lane_bytes;
            for (int64_t lane = begin; lane < end; ++lane) {
                uint8_t* codes = row(lane).codes;
                move_lane<format, to_packed>(line, lane, codes + (codes == nullptr ? 0 : at),
                                             codes == nullptr ? 0 : n);
            }
        }
    }
}

template <class Fn>
void with_format(int32_t format, Fn&& fn) {
    switch (format) {
        case kF32:
            return fn(std::integral_constant<int32_t, kF32>());
        case kBF16:
            return fn(std::integral_constant<int32_t, kBF16>());
        case kF16:
            return fn(std::integral_constant<int32_t, kF16>());
        case kW8A8:
            return fn(std::integral_constant<int32_t, kW8A8>());
        case kW4A8:
            return fn(std::integral_constant<int32_t, kW4A8>());
        default:
            return fn(std::integral_constant<int32_t, kFP8>());
    }
}

Row row_at(const PackArgs& a, const PackedLayout& l, int64_t i) {
    const int64_t groups = l.groups();
    return {static_cast<uint8_t*>(a.codes) + i * row_code_bytes(l),
            a.scales == nullptr ? nullptr : a.scales + i * groups,
            a.zeros == nullptr ? nullptr : a.zeros + i * groups};
}

}  // namespace

void pack(const PackArgs& a) {
    const PackedLayout l(a.weight);
    uint8_t* matrix = static_cast<uint8_t*>(a.weight.data) + a.expert * l.matrix_bytes();
    const int64_t end = a.start + a.count;
    parallel(l.vectors, [&](int64_t task, int) {
        const int64_t panel = task / kPanelVectors, vector = task % kPanelVectors;
        const int64_t first = l.first_row(panel, vector), rows = l.rows_of(panel, vector);
        const int64_t begin = first < a.start ? a.start : first;
        const int64_t stop = first + rows < end ? first + rows : end;
        if (begin >= stop) return;
        // The vector's last row brings the lanes past the end with it.
        const int64_t lanes = stop == first + rows ? kVectorRows : stop - first;
        const auto row = [&](int64_t lane) {
            return lane < rows ? row_at(a, l, first + lane - a.start)
                               : Row{nullptr, nullptr, nullptr};
        };
        with_format(l.format, [&](auto format) {
            move_lanes<format.value, true>(l, matrix + l.panel_at(panel), l.width(panel), vector,
                                           begin - first, lanes, row);
        });
    });
}

void unpack(const PackArgs& a) {
    const PackedLayout l(a.weight);
    uint8_t* matrix = static_cast<uint8_t*>(a.weight.data) + a.expert * l.matrix_bytes();
    parallel(a.count, [&](int64_t i, int) {
        const Place at = place_of(l, a.ids == nullptr ? a.start + i : a.ids[i]);
        with_format(l.format, [&](auto format) {
            move_lanes<format.value, false>(l, matrix + l.panel_at(at.panel), l.width(at.panel),
                                            at.vector, at.lane, at.lane + 1,
                                            [&](int64_t) { return row_at(a, l, i); });
        });
    });
}

}  // namespace moestro
