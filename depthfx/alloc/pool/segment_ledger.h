/* Who has which bytes of one address range: segments (every byte is in exactly one) and mappings (what the driver must unmap whole).
 * Both are arrays sorted by address, found by bisection. Nothing here locks or calls the driver. */
#ifndef DEPTHFX_SEGMENT_LEDGER_H
#define DEPTHFX_SEGMENT_LEDGER_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    HOLE,    /* addresses without memory */
    CACHED,  /* memory that no work names: handed out or unmapped at any time */
    LIVE,    /* PyTorch's */
    PENDING, /* given back by PyTorch, but queued work may still name it */
    LOST,    /* mapped without access by a call that failed, and the driver refused to unmap it; trim tries again */
    NUM_STATES
} State;

typedef struct {
    uint64_t at;
    size_t size;
    State state;
    size_t asked;      /* LIVE: bytes of the request */
    void* stream;      /* LIVE, PENDING: the stream of the request */
    uint64_t freed_at; /* PENDING: number of the free */
} Segment;

typedef struct {
    uint64_t at;
    size_t size;
    int fresh; /* made by the call in progress */
} Mapping;

typedef struct {
    Segment* segments;
    size_t num_segments, segments_room;
    Mapping* mappings;
    size_t num_mappings, mappings_room;
} Ledger;

static inline int grow(void** array, size_t* room, size_t wanted, size_t item) {
    if (wanted <= *room) return 0;
    size_t larger = wanted + wanted / 2 + 16;
    void* moved = realloc(*array, larger * item);
    if (moved == NULL) return -1;
    *array = moved;
    *room = larger;
    return 0;
}

/* Makes sure of room for so many more entries, so that what follows cannot fail; -1 without host memory. */
static inline int ledger_room(Ledger* ledger, size_t segments, size_t mappings) {
    if (grow((void**)&ledger->segments, &ledger->segments_room, ledger->num_segments + segments, sizeof(Segment))) return -1;
    return grow((void**)&ledger->mappings, &ledger->mappings_room, ledger->num_mappings + mappings, sizeof(Mapping));
}

/* One hole from `at` on. */
static inline int ledger_init(Ledger* ledger, uint64_t at, size_t size) {
    memset(ledger, 0, sizeof *ledger);
    if (ledger_room(ledger, 1, 0)) return -1;
    ledger->segments[0] = (Segment){.at = at, .size = size, .state = HOLE};
    ledger->num_segments = 1;
    return 0;
}

static inline void ledger_drop(Ledger* ledger) {
    free(ledger->segments);
    free(ledger->mappings);
    memset(ledger, 0, sizeof *ledger);
}

/* Index of the segment that holds address `at`, which must lie in the range. */
static inline size_t segment_at(const Ledger* ledger, uint64_t at) {
    size_t low = 0, high = ledger->num_segments;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (ledger->segments[middle].at <= at) low = middle;
        else high = middle;
    }
    return low;
}

/* Index of the first mapping that starts at `at` or behind it. */
static inline size_t mapping_from(const Ledger* ledger, uint64_t at) {
    size_t low = 0, high = ledger->num_mappings;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ledger->mappings[middle].at < at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static inline void erase_segments(Ledger* ledger, size_t first, size_t count) {
    Segment* from = ledger->segments + first;
    memmove(from, from + count, (ledger->num_segments - first - count) * sizeof(Segment));
    ledger->num_segments -= count;
}

static inline void split_segment(Ledger* ledger, uint64_t at) {
    size_t index = segment_at(ledger, at);
    Segment* segment = ledger->segments + index;
    if (segment->at == at || at >= segment->at + segment->size) return;
    memmove(segment + 1, segment, (ledger->num_segments - index) * sizeof(Segment));
    segment[0].size = at - segment->at;
    segment[1].at = at;
    segment[1].size -= segment[0].size;
    ledger->num_segments++;
}

/* [at, at + size) becomes one segment of `state`; holes, cached and lost ones join their equal neighbours. Needs room for 2 segments. */
static inline Segment* assign(Ledger* ledger, uint64_t at, size_t size, State state) {
    split_segment(ledger, at);
    split_segment(ledger, at + size);
    size_t first = segment_at(ledger, at), end = first;
    while (end < ledger->num_segments && ledger->segments[end].at < at + size) end++;
    erase_segments(ledger, first + 1, end - first - 1);
    ledger->segments[first] = (Segment){.at = at, .size = size, .state = state};
    if (state == LIVE || state == PENDING) return ledger->segments + first;
    if (first + 1 < ledger->num_segments && ledger->segments[first + 1].state == state) {
        ledger->segments[first].size += ledger->segments[first + 1].size;
        erase_segments(ledger, first + 1, 1);
    }
    if (first > 0 && ledger->segments[first - 1].state == state) {
        first--;
        ledger->segments[first].size += ledger->segments[first + 1].size;
        erase_segments(ledger, first + 1, 1);
    }
    return ledger->segments + first;
}

/* Needs room for 1 mapping. */
static inline void add_mapping(Ledger* ledger, uint64_t at, size_t size) {
    size_t index = mapping_from(ledger, at);
    Mapping* mapping = ledger->mappings + index;
    memmove(mapping + 1, mapping, (ledger->num_mappings - index) * sizeof(Mapping));
    *mapping = (Mapping){.at = at, .size = size, .fresh = 1};
    ledger->num_mappings++;
}

static inline void drop_mapping(Ledger* ledger, size_t index) {
    Mapping* mapping = ledger->mappings + index;
    memmove(mapping, mapping + 1, (ledger->num_mappings - index - 1) * sizeof(Mapping));
    ledger->num_mappings--;
}

/* Where `size` bytes cost the fewest bytes of new memory, and among equals in the smallest segment: a cached one, a hole, or neighbours of
 * both kinds. Returns the address, or 0; `fresh` is what must be mapped. */
static inline uint64_t find_place(const Ledger* ledger, size_t size, size_t* fresh) {
    uint64_t best = 0;
    size_t best_fresh = SIZE_MAX, best_size = SIZE_MAX;
    for (size_t i = 0; i < ledger->num_segments; i++) {
        const Segment* segment = ledger->segments + i;
        size_t have = 0, missing = 0;
        for (size_t j = i; j < ledger->num_segments && have < size && missing <= best_fresh; j++) {
            const Segment* next = ledger->segments + j;
            if (next->state != HOLE && next->state != CACHED) break;
            size_t part = next->size < size - have ? next->size : size - have;
            have += part;
            missing += next->state == HOLE ? part : 0;
        }
        if (have < size || missing > best_fresh || (missing == best_fresh && segment->size >= best_size)) continue;
        best = segment->at;
        best_fresh = missing;
        best_size = segment->size;
    }
    *fresh = best_fresh;
    return best;
}

#endif
