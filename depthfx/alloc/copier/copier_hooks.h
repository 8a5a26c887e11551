/* For tests: at three places the thread may be slowed, stopped, failed or ended. Nothing of it is on unless it is asked for. */
#ifndef DEPTHFX_COPIER_HOOKS_H
#define DEPTHFX_COPIER_HOOKS_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { BEFORE_CHUNK, AFTER_CHUNK, BEFORE_DONE, NUM_PLACES };
enum { HOOK_PASSED, HOOK_FAILED, HOOK_ENDS };
static const char* const place_names[NUM_PLACES] = {"before chunk", "after chunk", "before done"};

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t random; /* state of xorshift64; 0: no random delays */
    double delay_share, fail_share;
    unsigned most_us;
    int hold_place, fail_place;
    long hold_in, fail_in, num_failures; /* at the how-many-th arrival from now; 0: not at all */
    int ends, held;
} Hooks;

static double draw(Hooks* hooks) {
    uint64_t x = hooks->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    hooks->random = x;
    return (double)(x >> 11) / (double)((uint64_t)1 << 53);
}

static int fails_here(Hooks* hooks, int place) {
    if (hooks->fail_in == 0 || hooks->fail_place != place) return 0;
    if (--hooks->fail_in > 0) return 0;
    if (--hooks->num_failures > 0) hooks->fail_in = 1;
    return 1;
}

/* What the tests asked for at this place; a reason for what fails in `why`. */
static int hook(Hooks* hooks, int place, char* why, size_t room) {
    unsigned delay_us = 0;
    pthread_mutex_lock(&hooks->lock);
    int failed = fails_here(hooks, place);
    if (hooks->random != 0) {
        if (draw(hooks) < hooks->delay_share) delay_us = (unsigned)(draw(hooks) * hooks->most_us);
        if (draw(hooks) < hooks->fail_share) failed = 1;
    }
    if (hooks->hold_in > 0 && hooks->hold_place == place && --hooks->hold_in == 0) {
        hooks->held = 1;
        pthread_cond_broadcast(&hooks->changed);
        while (hooks->held) pthread_cond_wait(&hooks->changed, &hooks->lock);
    }
    int ends = failed && hooks->ends;
    pthread_mutex_unlock(&hooks->lock);
    if (delay_us) nanosleep(&(struct timespec){0, (long)delay_us * 1000}, NULL);
    if (failed) snprintf(why, room, "injected %s", place_names[place]);
    return ends ? HOOK_ENDS : failed ? HOOK_FAILED : HOOK_PASSED;
}

#endif
